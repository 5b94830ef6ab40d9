"""How a functional module stands with the orchestrator: its state, its rate, its strikes, its suspension.

Pure; `arbitration` keeps one `Standing` per (module, version). A module that floods or suggests nonsense
again and again is suspended for a while, and then listened to afresh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.errors import BadInput, NotFound
from schemas.policy import ModuleLifecycle, ModuleState

OVER = (ModuleState.DRAINING, ModuleState.RETIRED)

Key = tuple[str, str]
"""(module, version): two versions of a module may run side by side, one of them in shadow."""

STRANGERS: Key = ("", "")
"""All modules that have not registered share this one standing, so that they can't flood either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingConfig:
    """What a module may do to the orchestrator."""

    rate_per_s: float = 2.0
    """Suggestions a second that one module may make over a long time."""

    burst: int = 20
    """Suggestions that one module may make at once."""

    flood_limit: int = 200
    """Suggestions over the rate, without a pause, until the module is suspended."""

    nonsense_limit: int = 10
    """Nonsensical suggestions in a row until the module is suspended."""

    suspension_s: float = 300.0
    """Seconds until a suspended module is listened to again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One version of one module. `allowance` is a token bucket; the strikes count in a row."""

    state: ModuleState = ModuleState.REGISTERED
    sid: str | None = None
    jobs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    allowance: float = math.inf
    allowance_at: float = 0.0
    over_rate: int = 0
    nonsense: int = 0
    suspended_until: float = -math.inf
    suspended_for: str = ""


def register(
    modules: Mapping[Key, Standing], lifecycle: ModuleLifecycle, now: float
) -> Mapping[Key, Standing]:
    """Note what a module says of itself. Strikes and a running suspension outlive its restart."""
    key = (lifecycle.module, lifecycle.version)
    known = modules.get(key)
    if lifecycle.state is ModuleState.RETIRED and (known is None or known.suspended_until <= now):
        return {other: standing for other, standing in modules.items() if other != key}
    standing = replace(
        known or Standing(),
        state=lifecycle.state,
        sid=lifecycle.sid,
        jobs=lifecycle.jobs,
        without=lifecycle.without,
    )
    return {**modules, key: standing}


def running(modules: Mapping[Key, Standing], module: str, version: str | None) -> tuple[Key, Standing]:
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


def heard(standing: Standing, now: float, config: StandingConfig) -> tuple[Standing, bool]:
    """Count one suggestion against the rate; False if it is one too many. Ends an expired suspension."""
    if standing.suspended_for and standing.suspended_until <= now:
        standing = replace(standing, suspended_for="", nonsense=0, over_rate=0)
    earned = max(0.0, now - standing.allowance_at) * config.rate_per_s
    allowance = min(float(config.burst), standing.allowance + earned)
    passed = allowance >= 1
    over = 0 if passed else standing.over_rate + 1
    return replace(standing, allowance=allowance - passed, allowance_at=now, over_rate=over), passed


def suspension(standing: Standing, config: StandingConfig, *, nonsense: str = "") -> str:
    """Why the module must be suspended now; empty if it need not be."""
    if standing.over_rate >= config.flood_limit:
        return f"{standing.over_rate} suggestions over {config.rate_per_s:g}/s without a pause"
    if nonsense and standing.nonsense >= config.nonsense_limit:
        return f"{standing.nonsense} nonsensical suggestions in a row, the last: {nonsense}"
    return ""


def suspend(standing: Standing, why: str, now: float, config: StandingConfig) -> Standing:
    return replace(standing, suspended_until=now + config.suspension_s, suspended_for=why)
