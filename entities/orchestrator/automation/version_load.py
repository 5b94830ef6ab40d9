"""How many replicas a version of a service needs by what it is asked. Pure (ADR-0157).

Room decides: sessions, and rows of the cache, of which each replica takes so many; and, if the job file says
how slow a token may be, that. More is needed for some seconds before replicas come, fewer for a minute before
one leaves, and nobody asks for minutes before all slots are given back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from schemas.job_file.parallel import ReplicaRange
from schemas.serve_spec import ScaleSpec

ROUNDING = 1e-9
"""A need that exceeds a whole number by less is that number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionLoad:
    """What a version is asked, of all gateways together.

    Attributes:
        sessions: Answers under way.
        refused: Requests of the last seconds that found all instances full.
        room: Sessions that one replica takes at a time.
        used: Part of the cache that is in use, of the stage that uses most of its own.
        token_ms: From a token to the next by what waves take now, milliseconds; 0: not known.
        tokens_per_s: Of all replicas together.
        asked_at: When it was last asked anything, or had an answer under way.
    """

    sessions: int = 0
    refused: int = 0
    room: int = 1
    used: float = 0.0
    token_ms: float = 0.0
    tokens_per_s: float = 0.0
    asked_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    """What a decision has to know of earlier looks.

    Attributes:
        begun_at: When this version was first looked at since it started.
        more_since: Since when more replicas are needed without a break.
        fewer_since: Since when fewer are.
        most_needed: The most that were needed since then.
    """

    begun_at: float
    more_since: float | None = None
    fewer_since: float | None = None
    most_needed: int = 0


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """Another number of replicas, and why. 0: it gives all slots back."""

    replicas: int
    reason: str


def decide(
    load: VersionLoad,
    replicas: int,
    within: ReplicaRange,
    rules: ScaleSpec,
    memory: ScaleMemory,
    now: float,
) -> tuple[ScaleDecision | None, ScaleMemory]:
    """Whether a version is to have another number of replicas.

    Args:
        load: What it is asked.
        replicas: Those that it has, or is to have by an earlier decision.
        within: The fewest and the most.
        rules: Of its job file.
        memory: Of the last call.
        now: Seconds, by the clock of all times here.

    Returns:
        None: it stays as it is.
    """
    if not within.min and load.sessions == 0:
        idle_s = now - max(load.asked_at, memory.begun_at)
        if idle_s >= rules.idle_s:
            return ScaleDecision(0, f"nobody has asked it for {idle_s:.0f} s"), memory
    needed, why = need(load, replicas, rules)
    wanted = min(within.max, max(within.least, math.ceil(needed - ROUNDING)))
    if wanted > replicas:
        since = now if memory.more_since is None else memory.more_since
        memory = replace(memory, more_since=since, fewer_since=None, most_needed=0)
        if now - since < rules.up_s:
            return None, memory
        return ScaleDecision(wanted, why), replace(memory, more_since=None)
    memory = replace(memory, more_since=None)
    if wanted == replicas:
        return None, replace(memory, fewer_since=None, most_needed=0)
    since = now if memory.fewer_since is None else memory.fewer_since
    most = max(memory.most_needed, wanted)
    if now - since < rules.down_s:
        return None, replace(memory, fewer_since=since, most_needed=most)
    fewer = f"no more than {most} needed for {now - since:.0f} s: {why}"
    return ScaleDecision(most, fewer), replace(memory, fewer_since=None, most_needed=0)


def need(load: VersionLoad, replicas: int, rules: ScaleSpec) -> tuple[float, str]:
    """How many replicas the load fills as far as the rules let it, with a fraction; and by what, in words."""
    sessions = load.sessions + load.refused
    said = f"{load.sessions} sessions"
    if load.refused:
        said += f" and {load.refused} refused for want of room"
    found = [
        (sessions / (load.room * rules.fill), f"{said}, of {load.room} per replica"),
        (load.used * replicas / rules.fill, f"{load.used:.0%} of the cache in use"),
    ]
    if rules.token_ms is not None and load.token_ms > rules.token_ms:
        # More replicas than sessions make no token faster.
        slow = min(replicas * load.token_ms / rules.token_ms, float(load.sessions))
        found.append((slow, f"{load.token_ms:.0f} ms from token to token, of {rules.token_ms:g}"))
    needed, why = max(found, key=lambda each: each[0])
    if load.tokens_per_s:
        why += f"; {load.tokens_per_s / max(1, replicas):.3g} tokens/s per replica"
    return needed, why
