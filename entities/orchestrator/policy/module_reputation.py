"""The reputation of a functional module at the orchestrator: its state, rate, strikes and suspension.

Pure; `arbitration` keeps one `ModuleReputation` per (module, version). A module that floods the orchestrator,
or repeatedly suggests nonsense, is suspended for a while; afterwards it starts afresh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from schemas import names
from schemas.errors import BadInput, NotFound
from schemas.module_status import ModuleStatus
from schemas.policy import ModuleLifecycle, ModuleOp, ModuleState

OVER = (ModuleState.DRAINING, ModuleState.RETIRED)

Key = tuple[str, str]
"""(module, version): two versions of a module may run side by side, one of them in shadow."""

STRANGERS: Key = ("", "")
"""All modules that have not registered share this one reputation, so that they can't flood either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReputationConfig:
    """Limits for the suggestions of one module."""

    rate_per_s: float = 2.0
    """Suggestions a second that one module may make on average."""

    burst: int = 20
    """Suggestions that one module may make at once."""

    flood_limit: int = 200
    """Suggestions over the rate, without a pause, after which the module is suspended."""

    nonsense_limit: int = 10
    """Nonsensical suggestions in a row after which the module is suspended."""

    lag_limit: int = 20
    """Outdated suggestions in a row after which the module is suspended: it does not keep up."""

    crash_limit: int = 5
    """Crashes (starts without a retirement before) within `crash_window_s` after which it is suspended."""

    crash_window_s: float = 600.0

    suspension_s: float = 300.0
    """Seconds until suggestions of a suspended module are considered again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedState:
    """The state that orders have given a module; after a crash it is ordered into this state again."""

    state: ModuleState | None = None
    enabled: frozenset[str] = frozenset()
    disabled: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleReputation:
    """The reputation of one version of one module.

    `allowance` is a token bucket. `over_rate`, `nonsense` and `lagging` count suggestions in a row; the other
    counts run since the module first registered, also under earlier orchestrators (`reputation_store`).
    `crashed_at`: the times of the crashes that still count.
    """

    state: ModuleState = ModuleState.REGISTERED
    sid: str | None = None
    incarnation: str | None = None
    jobs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    said: str = ""
    drift: str = ""
    wanted: OrderedState = OrderedState()
    allowance: float = math.inf
    allowance_at: float = 0.0
    over_rate: int = 0
    nonsense: int = 0
    lagging: int = 0
    crashed_at: tuple[float, ...] = ()
    suspended_until: float = -math.inf
    suspended_for: str = ""
    owner: str = names.MESH
    answers_faults: bool = False
    suggestions: int = 0
    adopted: int = 0
    strikes: int = 0
    crashes: int = 0


def register(
    modules: Mapping[Key, ModuleReputation],
    lifecycle: ModuleLifecycle,
    now: float,
    config: ReputationConfig = ReputationConfig(),
) -> Mapping[Key, ModuleReputation]:
    """Notes the state that a module reports. Strikes and a running suspension survive its restart."""
    key = (lifecycle.module, lifecycle.version)
    known = modules.get(key)
    if lifecycle.state is ModuleState.RETIRED and (known is None or known.suspended_until <= now):
        return {other: standing for other, standing in modules.items() if other != key}
    standing = known or ModuleReputation()
    if known is not None and _crashed(known, lifecycle):
        standing = _count_crash(known, now, config)
    standing = replace(
        standing,
        state=lifecycle.state,
        sid=lifecycle.sid,
        incarnation=lifecycle.incarnation,
        jobs=lifecycle.jobs,
        without=lifecycle.without,
        said=lifecycle.reason,
        drift=lifecycle.drift,
        owner=lifecycle.owner,
        answers_faults=lifecycle.answers_faults,
    )
    return {**modules, key: standing}


def promote(promoted: Mapping[str, str], module: str, version: str | None) -> Mapping[str, str]:
    """Makes one version the only one whose suggestions are adopted; None: each is in the state it reports."""
    others = {name: active for name, active in promoted.items() if name != module}
    return others if version is None else {**others, module: version}


def as_promoted(standing: ModuleReputation, key: Key, promoted: Mapping[str, str]) -> ModuleReputation:
    """The reputation with the state that a promotion gives it.

    If a version of the module was promoted, that one counts as active and all others as in shadow, even
    before they have got their orders.
    """
    module, version = key
    active = promoted.get(module)
    if active is None or standing.state not in (ModuleState.ACTIVE, ModuleState.SHADOW):
        return standing
    state = ModuleState.ACTIVE if version == active else ModuleState.SHADOW
    return standing if standing.state is state else replace(standing, state=state)


def _crashed(known: ModuleReputation, lifecycle: ModuleLifecycle) -> bool:
    """Whether a new process reports although the former one never said that it leaves."""
    return lifecycle.incarnation != known.incarnation and known.state not in OVER


def _count_crash(standing: ModuleReputation, now: float, config: ReputationConfig) -> ModuleReputation:
    recent = (*(at for at in standing.crashed_at if now - at < config.crash_window_s), now)
    standing = replace(
        standing, crashed_at=recent, crashes=standing.crashes + 1, strikes=standing.strikes + 1
    )
    if len(recent) < config.crash_limit:
        return standing
    why = f"{len(recent)} crashes within {config.crash_window_s:.0f} s"
    return suspend(replace(standing, crashed_at=()), why, now, config)


def ordered(standing: ModuleReputation, op: ModuleOp, jobs: tuple[str, ...]) -> ModuleReputation:
    """Notes an order that the module has carried out."""
    wanted, named = standing.wanted, frozenset(jobs)
    match op:
        case ModuleOp.ACTIVATE:
            wanted = replace(wanted, state=ModuleState.ACTIVE)
        case ModuleOp.SHADOW:
            wanted = replace(wanted, state=ModuleState.SHADOW)
        case ModuleOp.ENABLE:
            wanted = replace(wanted, enabled=wanted.enabled | named, disabled=wanted.disabled - named)
        case ModuleOp.DISABLE:
            wanted = replace(wanted, enabled=wanted.enabled - named, disabled=wanted.disabled | named)
    return replace(standing, wanted=wanted)


def due_orders(standing: ModuleReputation) -> list[tuple[ModuleOp, tuple[str, ...]]]:
    """The orders to repeat to a module that came back in another state than the ordered one."""
    if standing.state not in (ModuleState.ACTIVE, ModuleState.SHADOW):
        return []
    orders: list[tuple[ModuleOp, tuple[str, ...]]] = []
    wanted = standing.wanted
    if wanted.state is not None and wanted.state is not standing.state:
        orders.append((ModuleOp.ACTIVATE if wanted.state is ModuleState.ACTIVE else ModuleOp.SHADOW, ()))
    missing = {job for job in wanted.enabled if not serves(standing, job)}
    if missing:
        orders.append((ModuleOp.ENABLE, tuple(sorted(missing))))
    if wanted.disabled - set(standing.without):
        orders.append((ModuleOp.DISABLE, tuple(sorted(wanted.disabled))))
    return orders


def serves(standing: ModuleReputation, job: str) -> bool:
    """Whether the module is enabled for this job."""
    return job not in standing.without and (not standing.jobs or job in standing.jobs)


def answerers(
    modules: Mapping[Key, ModuleReputation], promoted: Mapping[str, str], job: str, user: str, now: float
) -> dict[Key, ModuleReputation]:
    """Those that say what to do about faults of this job of `user`, active or in shadow."""
    listening = (ModuleState.ACTIVE, ModuleState.SHADOW)
    return {
        key: as_promoted(standing, key, promoted)
        for key, standing in modules.items()
        if standing.answers_faults
        and standing.owner in (names.MESH, user)
        and standing.suspended_until <= now
        and standing.state in listening
        and serves(standing, job)
    }


def running(
    modules: Mapping[Key, ModuleReputation], module: str, version: str | None
) -> tuple[Key, ModuleReputation]:
    """The running version that an order to this module is for.

    Raises:
        NotFound: no module of that name and version runs.
        BadInput: several versions run and `version` is None.
    """
    matching = {
        key: reputation
        for key, reputation in modules.items()
        if key[0] == module
        and version in (None, key[1])
        and reputation.state not in OVER
        and reputation.sid is not None
    }
    if not matching:
        which = module if version is None else f"{module} {version}"
        raise NotFound(f"no module {which} runs: `dmsc policy list` shows which do", module=module)
    if len(matching) > 1:
        versions = ", ".join(sorted(key[1] for key in matching))
        raise BadInput(f"{module} runs in versions {versions}: say which", module=module)
    return matching.popitem()


def heard(standing: ModuleReputation, now: float, config: ReputationConfig) -> tuple[ModuleReputation, bool]:
    """Counts one suggestion against the rate; False if it is over the rate. Ends an expired suspension."""
    if standing.suspended_for and standing.suspended_until <= now:
        standing = replace(standing, suspended_for="", nonsense=0, over_rate=0, lagging=0)
    earned = max(0.0, now - standing.allowance_at) * config.rate_per_s
    allowance = min(float(config.burst), standing.allowance + earned)
    passed = allowance >= 1
    over = 0 if passed else standing.over_rate + 1
    counted = replace(
        standing,
        allowance=allowance - passed,
        allowance_at=now,
        over_rate=over,
        suggestions=standing.suggestions + 1,
        strikes=standing.strikes + (not passed),
    )
    return counted, passed


def judged(standing: ModuleReputation, *, adopted: bool, nonsense: bool, lagging: bool) -> ModuleReputation:
    """Counts the outcome of one suggestion that was within the rate."""
    return replace(
        standing,
        nonsense=standing.nonsense + 1 if nonsense else 0,
        lagging=standing.lagging + 1 if lagging else 0,
        adopted=standing.adopted + adopted,
        strikes=standing.strikes + (nonsense or lagging),
    )


def suspension(standing: ModuleReputation, config: ReputationConfig, *, nonsense: str = "") -> str:
    """Why the module must be suspended now; empty if it need not be."""
    if standing.over_rate >= config.flood_limit:
        return f"{standing.over_rate} suggestions over {config.rate_per_s:g}/s without a pause"
    if nonsense and standing.nonsense >= config.nonsense_limit:
        return f"{standing.nonsense} nonsensical suggestions in a row, the last: {nonsense}"
    if standing.lagging >= config.lag_limit:
        return f"{standing.lagging} suggestions in a row from too long ago: it does not keep up"
    return ""


def suspend(standing: ModuleReputation, why: str, now: float, config: ReputationConfig) -> ModuleReputation:
    """Suspends the module for `suspension_s`, for the reason `why`."""
    return replace(standing, suspended_until=now + config.suspension_s, suspended_for=why)


def unreadable(
    modules: Mapping[Key, ModuleReputation],
    why: str,
    now: float,
    config: ReputationConfig = ReputationConfig(),
    *,
    owner: str,
    module: str,
) -> Mapping[Key, ModuleReputation]:
    """Counts a suggestion that can't be read, as nonsense of all running versions: its own is unknown."""
    counted = dict(modules)
    for key, standing in modules.items():
        if (key[0], standing.owner) != (module, owner) or standing.state in OVER:
            continue
        if now < standing.suspended_until:
            continue
        standing, _ = heard(standing, now, config)
        standing = judged(standing, adopted=False, nonsense=True, lagging=False)
        suspended_for = suspension(standing, config, nonsense=why)
        counted[key] = suspend(standing, suspended_for, now, config) if suspended_for else standing
    return counted


def statuses(
    modules: Mapping[Key, ModuleReputation], alive: Callable[[str], bool], now: float
) -> tuple[ModuleStatus, ...]:
    """The status of all known modules, by name and version. `alive`: whether a process is registered."""
    return tuple(
        _status(key, standing, standing.sid is None or alive(standing.sid), now)
        for key, standing in sorted(modules.items())
        if key != STRANGERS
    )


def _status(key: Key, standing: ModuleReputation, alive: bool, now: float) -> ModuleStatus:
    left_s = max(0.0, standing.suspended_until - now)
    return ModuleStatus(
        module=key[0],
        version=key[1],
        sid=standing.sid,
        state=ModuleState.SUSPENDED if left_s else standing.state,
        alive=alive,
        jobs=standing.jobs,
        without=standing.without,
        suggestions=standing.suggestions,
        adopted=standing.adopted,
        declined=standing.suggestions - standing.adopted,
        strikes=standing.strikes,
        crashes=standing.crashes,
        suspended_s=round(left_s, 1),
        reason=standing.suspended_for if left_s else standing.said or standing.drift,
        drift=standing.drift,
    )
