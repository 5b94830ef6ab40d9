"""Moves of an instance to another stage: which one is possible. Pure; `change_account` judges its worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMembers:
    """Working replicas by stage, by their SIDs in the job's graph; standbys are not among them."""

    working: Mapping[int, Sequence[str]]
    standbys: frozenset[str] = frozenset()
    coming: tuple[str, ...] = ()

    def stage_of(self, sid: str) -> int | None:
        return next((stage for stage, sids in self.working.items() if sid in sids), None)


def impossible(sid: str, stage: int, crew: StageMembers) -> str:
    """Why this move is impossible now, for a policy and a person alike; empty if it is possible."""
    if stage not in crew.working:
        return f"there is no stage {stage}"
    if sid in crew.standbys:
        return f"{sid} is a standby: it is there for its stage alone"
    here = crew.stage_of(sid)
    if here is None:
        return f"{sid} works in no stage now"
    if here == stage:
        return f"{sid} is in stage {stage} already"
    if len(crew.working[here]) < 2:
        return f"{sid} is the last replica of stage {here}"
    if crew.coming:
        return f"{', '.join(crew.coming)} must have joined first"
    return ""


def direction(here: int | None, there: int | None) -> str:
    """A move's direction, by which the account knows it again."""
    return f"stage {here} → stage {there}"
