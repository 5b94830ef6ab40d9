"""Which instance of each stage works for a session: the one with the most room, then the fastest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from entities.gateway.generation.session_machine import ChoosePath, Path
from schemas.services.generation import SessionLoad
from schemas.step import Member

UNKNOWN = SessionLoad()


@dataclass(frozen=True, slots=True)
class KnownLoad:
    """What an instance said last, and how many sessions this gateway has bound to it since."""

    said: SessionLoad = UNKNOWN
    own: int = 0


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


def _rank(member: Member, load: KnownLoad | None, key: str) -> tuple[float, float, bytes]:
    load = load or KnownLoad()
    said = load.said
    sessions = max(said.sessions, load.own)
    taken = sessions / said.most_sessions if said.most_sessions else float(sessions)
    if said.rows:
        taken = max(taken, 1.0 - said.free_rows / said.rows)
    return taken, said.wave_ms, blake2b(f"{key}/{member.sid}".encode(), digest_size=8).digest()
