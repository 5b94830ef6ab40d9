"""How a functional module stands with the orchestrator: its state, its rate, its strikes, its suspension.

Pure; `arbitration` keeps one `ModuleReputation` per (module, version). A module that floods or suggests
nonsense again and again is suspended for a while, and then listened to afresh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas import names
from schemas.errors import BadInput, NotFound
from schemas.policy import ModuleLifecycle, ModuleOp, ModuleState

OVER = (ModuleState.DRAINING, ModuleState.RETIRED)

Key = tuple[str, str]
"""(module, version): two versions of a module may run side by side, one of them in shadow."""

STRANGERS: Key = ("", "")
"""All modules that have not registered share this one standing, so that they can't flood either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReputationConfig:
    """What a module may do to the orchestrator."""

    rate_per_s: float = 2.0
    """Suggestions a second that one module may make over a long time."""

    burst: int = 20
    """Suggestions that one module may make at once."""

    flood_limit: int = 200
    """Suggestions over the rate, without a pause, until the module is suspended."""

    nonsense_limit: int = 10
    """Nonsensical suggestions in a row until the module is suspended."""

    lag_limit: int = 20
    """Suggestions in a row from long ago until the module is suspended: it does not keep up."""

    crash_limit: int = 5
    """Starts without having retired within `crash_window_s` until the module is suspended."""

    crash_window_s: float = 600.0

    suspension_s: float = 300.0
    """Seconds until a suspended module is listened to again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedState:
    """What an order has made of a module. One that crashes comes back as this, whatever it was started as."""

    state: ModuleState | None = None
    enabled: frozenset[str] = frozenset()
    disabled: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleReputation:
    """One version of one module.

    `allowance` is a token bucket; `over_rate`, `nonsense` and `lagging` count in a row, the others since
    it first registered, whoever led (`standing_records`). `crashed_at` has the last crashes, for as long
    as they count.
    """

    state: ModuleState = ModuleState.REGISTERED
    sid: str | None = None
    incarnation: str | None = None
    jobs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    said: str = ""
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
    """Note what a module says of itself. Strikes and a running suspension outlive its restart."""
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
        owner=lifecycle.owner,
    )
    return {**modules, key: standing}


def promote(promoted: Mapping[str, str], module: str, version: str | None) -> Mapping[str, str]:
    """Only this version's suggestions are adopted any more; None: of each version as it says itself."""
    others = {name: active for name, active in promoted.items() if name != module}
    return others if version is None else {**others, module: version}


def as_promoted(standing: ModuleReputation, key: Key, promoted: Mapping[str, str]) -> ModuleReputation:
    """As the orchestrator has it: where a version of the module was promoted, that one is active and the
    others are in shadow, from that moment on, whatever they have been told by then."""
    module, version = key
    active = promoted.get(module)
    if active is None or standing.state not in (ModuleState.ACTIVE, ModuleState.SHADOW):
        return standing
    state = ModuleState.ACTIVE if version == active else ModuleState.SHADOW
    return standing if standing.state is state else replace(standing, state=state)


def _crashed(known: ModuleReputation, lifecycle: ModuleLifecycle) -> bool:
    """Whether this is another process than the one that we know, which never said that it leaves."""
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
    """Note an order that was obeyed."""
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
    """What to order again of a module that came back as it was started, not as it was ordered to be."""
    if standing.state not in (ModuleState.ACTIVE, ModuleState.SHADOW):
        return []
    found: list[tuple[ModuleOp, tuple[str, ...]]] = []
    wanted = standing.wanted
    if wanted.state is not None and wanted.state is not standing.state:
        found.append((ModuleOp.ACTIVATE if wanted.state is ModuleState.ACTIVE else ModuleOp.SHADOW, ()))
    missing = {job for job in wanted.enabled if not serves(standing, job)}
    if missing:
        found.append((ModuleOp.ENABLE, tuple(sorted(missing))))
    if wanted.disabled - set(standing.without):
        found.append((ModuleOp.DISABLE, tuple(sorted(wanted.disabled))))
    return found


def serves(standing: ModuleReputation, job: str) -> bool:
    """Whether it is enabled for this job."""
    return job not in standing.without and (not standing.jobs or job in standing.jobs)


def running(
    modules: Mapping[Key, ModuleReputation], module: str, version: str | None
) -> tuple[Key, ModuleReputation]:
    """The one that an order to this module is for.

    Raises:
        NotFound: none of that name and version runs.
        BadInput: several versions run and none was named.
    """
    found = {
        key: one
        for key, one in modules.items()
        if key[0] == module and version in (None, key[1]) and one.state not in OVER and one.sid is not None
    }
    if not found:
        which = module if version is None else f"{module} {version}"
        raise NotFound(f"no module {which} runs: `dmsc policy list` shows which do", module=module)
    if len(found) > 1:
        versions = ", ".join(sorted(key[1] for key in found))
        raise BadInput(f"{module} runs in versions {versions}: say which", module=module)
    return found.popitem()


def heard(standing: ModuleReputation, now: float, config: ReputationConfig) -> tuple[ModuleReputation, bool]:
    """Count one suggestion against the rate; False if it is one too many. Ends an expired suspension."""
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
    """Count what became of one suggestion that was within the rate."""
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
    return replace(standing, suspended_until=now + config.suspension_s, suspended_for=why)
