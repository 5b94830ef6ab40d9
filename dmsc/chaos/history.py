"""What became of a job's steps, from its events and the decisions seen on the bus. Pure.

A step counts when it was committed and no later roll-back undid it. A roll-back is told (a `recovery` or a
`state` event lies between); a step that is committed again without one has been counted twice. A step that
nobody told of, but whose decision was seen on the bus, is committed all the same: the orchestrator may have
died between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.job import JobEvent, StepResult
from schemas.step import MicrobatchClaim

CLOCK_S = 0.05
"""A decision may be seen on the bus so much later than it was told."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A decision as seen on the bus, at `at` (seconds since the epoch)."""

    step: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Advance:
    """The way from one step's commit to the next one's, roll-backs between them included.

    Times are seconds since the epoch. `redone_from`: the earliest step that was run again on this way.
    """

    step: int
    began: float
    ended: float
    redone_from: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, kw_only=True)
class Count:
    """Lost and doubled: whole steps, and microbatches of a stage within one. `checked_steps`: by shares."""

    lost_steps: tuple[int, ...] = ()
    doubled_steps: tuple[int, ...] = ()
    lost_microbatches: int = 0
    doubled_microbatches: int = 0
    checked_steps: int = 0

    @property
    def lost(self) -> int:
        return len(self.lost_steps) + self.lost_microbatches

    @property
    def doubled(self) -> int:
        return len(self.doubled_steps) + self.doubled_microbatches


@dataclass(frozen=True, kw_only=True)
class History:
    """A job's steps: how it got from one to the next, and whether each counted once.

    `undone`: commits that roll-backs took back. `faults`: texts of the job's own fault events.
    """

    advances: tuple[Advance, ...]
    count: Count
    undone: int = 0
    faults: tuple[str, ...] = ()


@dataclass(slots=True)
class _Fold:
    """The state while events are read."""

    results: list[StepResult | None] = field(default_factory=list)  # by step; None: known by its decision
    advances: list[Advance] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    stage_of: dict[str, int] = field(default_factory=dict)
    undone: int = 0
    may_go_back: bool = False
    redone_from: int | None = None


def read(
    events: Iterable[JobEvent],
    decided: Sequence[Decided],
    *,
    microbatches: int,
    steps: int | None = None,
) -> History:
    """The history of one job.

    Args:
        events: in their order on the job's stream.
        decided: in order of time; may be empty or have gaps, then the events' times stand in.
        microbatches: that each stage must have counted in each step.
        steps: the job's length if it has ended well: steps up to it that are missing are lost.
    """
    fold, faults = _Fold(), []
    for event in events:
        if event.instances is not None:
            fold.stage_of.update((view.sid, view.stage) for view in event.instances)
        if event.kind in ("recovery", "state"):
            fold.may_go_back = True
        if event.kind == "fault":
            faults.append(event.text)
        if event.kind == "step" and event.result is not None:
            _step(fold, event.result, event.at, decided)
    for step in range(len(fold.results), steps or 0):
        _missing(fold, step, decided, until=float("inf"))
    return History(
        advances=tuple(fold.advances),
        count=_count(fold, microbatches),
        undone=fold.undone,
        faults=tuple(faults),
    )


def _step(fold: _Fold, result: StepResult, told_at: float, decided: Sequence[Decided]) -> None:
    step, expected = result.step, len(fold.results)
    if step < expected:
        if fold.results[step] == result:
            return  # told twice
        if not fold.may_go_back:
            fold.doubled.append(step)
            return
        fold.undone += expected - step
        fold.redone_from = min(step, fold.redone_from if fold.redone_from is not None else step)
        del fold.results[step:]
    for missing in range(expected, step):
        _missing(fold, missing, decided, until=told_at)
    fold.may_go_back = False
    fold.results.append(result)
    at = max((one.at for one in decided if one.step == step and one.at <= told_at + CLOCK_S), default=told_at)
    _advance(fold, step, at, result.step_s)


def _missing(fold: _Fold, step: int, decided: Sequence[Decided], *, until: float) -> None:
    at = max((one.at for one in decided if one.step == step and one.at <= until + CLOCK_S), default=None)
    fold.results.append(None)
    if at is None:
        fold.lost.append(step)
    else:
        _advance(fold, step, at, 0.0)


def _advance(fold: _Fold, step: int, at: float, step_s: float) -> None:
    """Only what leads beyond the furthest step so far is an advance; redone steps are on the way to it."""
    if fold.advances and step <= fold.advances[-1].step:
        return
    began = fold.advances[-1].ended if fold.advances else at - step_s
    redone_from = step if fold.redone_from is None else fold.redone_from
    fold.advances.append(Advance(step=step, began=began, ended=max(at, began), redone_from=redone_from))
    fold.redone_from = None


def _count(fold: _Fold, microbatches: int) -> Count:
    """Each stage's shares of a step must sum to its microbatches. Data instances have no share."""
    lost = doubled = checked = 0
    for result in fold.results:
        sums: dict[int, int] = {}
        for sid, share in result.shares.items() if result is not None else ():
            stage = fold.stage_of.get(sid)
            if stage is not None and stage >= 0:
                sums[stage] = sums.get(stage, 0) + share
        checked += bool(sums)
        lost += sum(max(microbatches - total, 0) for total in sums.values())
        doubled += sum(max(total - microbatches, 0) for total in sums.values())
    return Count(
        lost_steps=tuple(fold.lost),
        doubled_steps=tuple(fold.doubled),
        lost_microbatches=lost,
        doubled_microbatches=doubled,
        checked_steps=checked,
    )


@dataclass(frozen=True, kw_only=True)
class ComputedWork:
    """Microbatches that were computed, by step; of one step also by incarnation. From the claims."""

    units: Mapping[int, int] = field(default_factory=dict)
    by_owner: Mapping[tuple[int, str], int] = field(default_factory=dict)  # (step, incarnation)


def count_work(claims: Iterable[MicrobatchClaim]) -> ComputedWork:
    """One unit is one microbatch forward and backward on one stage, by whomever, counted or not.

    A claim that is repeated for the same work has the same times; work done again has others. What was
    only forwarded when its instance died is claimed by nobody and not in here.
    """
    seen: set[tuple[int, int, int, str, float, float]] = set()
    units: dict[int, int] = {}
    by_owner: dict[tuple[int, str], int] = {}
    for claim in claims:
        if claim.evaluate:
            continue
        owner = claim.owner.incarnation
        key = (claim.step, claim.stage, claim.microbatch, owner, claim.forward_ms, claim.backward_ms)
        if key in seen:
            continue
        seen.add(key)
        units[claim.step] = units.get(claim.step, 0) + 1
        by_owner[claim.step, owner] = by_owner.get((claim.step, owner), 0) + 1
    return ComputedWork(units=units, by_owner=by_owner)
