"""Which instance of each stage works for a session: the one with the most room, then the fastest. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from entities.gateway.generation.session_machine import ChoosePath, Path
from schemas.step import Member
from schemas.telemetry import SessionLoad

UNKNOWN = SessionLoad()


@dataclass(frozen=True, slots=True)
class KnownLoad:
    """What an instance said last, and when, and how many sessions this gateway has bound to it since.

    `at`: seconds on the gateway's monotonic clock. An instance speaks to gateways that have sessions
    there, and to no others.
    """

    said: SessionLoad = UNKNOWN
    own: int = 0
    at: float = -math.inf


def choose_path(
    stages: Sequence[Sequence[Member]],
    wanted: ChoosePath,
    loads: Mapping[str, KnownLoad],
    key: str,
) -> Path | str:
    """The path, or why there is none. `key`: spreads sessions over instances of equal load."""
    path: list[Member] = []
    for stage, members in enumerate(stages):
        kept = next((member for member in wanted.keep if member in members), None)
        able = [member for member in members if member not in wanted.avoid]
        if kept is None and not able:
            return f"stage {stage} has no instance that is ready" + (" and not avoided" if members else "")
        path.append(kept or min(able, key=lambda member: _rank(member, loads.get(member.sid), key)))
    return tuple(path) if path else "the version has no stages"


def disjoint_paths(
    stages: Sequence[Sequence[Member]], loads: Mapping[str, KnownLoad], key: str
) -> tuple[Path, ...] | str:
    """As many paths as the largest stage has instances, the one with the most room first, or why there is
    none. Two paths share an instance only where a stage has too few.
    """
    ranked = [
        sorted(members, key=lambda member: _rank(member, loads.get(member.sid), key)) for members in stages
    ]
    for stage, members in enumerate(ranked):
        if not members:
            return f"stage {stage} has no instance that is ready"
    if not ranked:
        return "the version has no stages"
    most = max(map(len, ranked))
    return tuple(tuple(members[number % len(members)] for members in ranked) for number in range(most))


def _rank(member: Member, load: KnownLoad | None, key: str) -> tuple[float, float, bytes]:
    load = load or KnownLoad()
    said = load.said
    sessions = max(said.sessions, load.own)
    taken = sessions / said.most_sessions if said.most_sessions else float(sessions)
    if said.rows:
        taken = max(taken, 1.0 - said.free_rows / said.rows)
    return taken, said.wave_ms, blake2b(f"{key}/{member.sid}".encode(), digest_size=8).digest()


def has_room(
    stages: Sequence[Sequence[Member]], loads: Mapping[str, KnownLoad], share: float, mine: int, since: float
) -> bool:
    """Whether each stage has an instance of which less than `share` is taken, by sessions and by rows.

    Instances without sessions have room, and those that have said nothing since then: the sessions of
    which they spoke before may have been another gateway's, whose end nobody tells this one. The next
    request's answer says how it is.

    Args:
        mine: Requests of the asker that were begun; they may be so new that no load has them, and take no
            more than `share` of all either.
        since: What was said before then, on the clock of `KnownLoad.at`, is too old.
    """
    return all(
        _stage_has_room([loads.get(each.sid) for each in members], share, mine, since) for members in stages
    )


def _stage_has_room(loads: Sequence[KnownLoad | None], share: float, mine: int, since: float) -> bool:
    most = sum(load.said.most_sessions for load in loads if load is not None)
    if most and mine >= share * most:
        return False
    return not loads or any(_taken(load, since) < share for load in loads)


def _taken(load: KnownLoad | None, since: float) -> float:
    if load is None:
        return 0.0
    said = load.said
    if load.at < since:
        return load.own / said.most_sessions if said.most_sessions else 0.0
    taken = max(said.sessions, load.own) / said.most_sessions if said.most_sessions else 0.0
    return max(taken, 1.0 - said.free_rows / said.rows if said.rows else 0.0)
