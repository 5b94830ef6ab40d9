"""The history of a job's steps, from its events and the decisions seen on the bus. Pure.

A step counts if it was committed and no later roll-back undid it. A roll-back is announced by a `recovery` or
`state` event; a step that is committed again without such an event was counted twice. A step without an event
is nevertheless committed if its decision was seen on the bus: the orchestrator may have died between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.computed_work import StepUnits, WorkNovelty
from schemas.job import JobEvent, StepResult
from schemas.step import MicrobatchClaim
from schemas.task_graph import is_data


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A decision that was seen on the bus at `at` (seconds since the epoch)."""

    step: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Advance:
    """The time from one step's commit to the next one's, including roll-backs between them.

    Times are seconds since the epoch. `redone_from` is the earliest step that was run again meanwhile.
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
    """What was lost or counted twice: whole steps, and microbatches of a stage within a step.

    `checked_steps` is the number of steps whose shares could be checked.
    """

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
    """A job's steps: how it advanced from one to the next, and whether each counted once.

    `undone` is the number of commits that roll-backs undid. `faults` has the texts of the job's fault events.
    """

    advances: tuple[Advance, ...]
    count: Count
    undone: int = 0
    faults: tuple[str, ...] = ()


@dataclass(slots=True)
class _Fold:
    """The state while events are read."""

    decided: Sequence[Decided]
    clock_s: float
    results: list[StepResult | None] = field(
        default_factory=list
    )  # by step; None: only its decision is known
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
    clock_s: float = 0.05,
) -> History:
    """Compute the history of one job.

    Args:
        events: The events in the order of the job's stream.
        decided: The decisions in order of time. Where they are missing, the events' times are used.
        microbatches: The number that each stage must have counted in each step.
        steps: The job's length if it has ended well; missing steps below it are lost.
        clock_s: By how much later than its event a decision may be seen on the bus.
    """
    fold, faults = _Fold(decided, clock_s), []
    for event in events:
        if event.instances is not None:
            fold.stage_of.update((view.sid, view.stage) for view in event.instances)
        if event.kind in ("recovery", "state"):
            fold.may_go_back = True
        if event.kind == "fault" and not event.warning:
            faults.append(event.text)
        if event.kind == "step" and event.result is not None:
            _step(fold, event.result, event.at)
    for step in range(len(fold.results), steps or 0):
        _missing(fold, step, until=float("inf"))
    return History(
        advances=tuple(fold.advances),
        count=_count(fold, microbatches),
        undone=fold.undone,
        faults=tuple(faults),
    )


def _step(fold: _Fold, result: StepResult, event_at: float) -> None:
    step, expected = result.step, len(fold.results)
    if step < expected:
        if fold.results[step] == result:
            return  # the same event came twice
        if not fold.may_go_back:
            fold.doubled.append(step)
            return
        fold.undone += expected - step
        fold.redone_from = min(step, fold.redone_from if fold.redone_from is not None else step)
        del fold.results[step:]
    for missing in range(expected, step):
        _missing(fold, missing, until=event_at)
    fold.may_go_back = False
    fold.results.append(result)
    at = _decided_at(fold, step, event_at)
    _advance(fold, step, event_at if at is None else at, result.step_s)


def _decided_at(fold: _Fold, step: int, until: float) -> float | None:
    """When a step's last decision before `until` was seen on the bus."""
    return max(
        (seen.at for seen in fold.decided if seen.step == step and seen.at <= until + fold.clock_s),
        default=None,
    )


def _missing(fold: _Fold, step: int, *, until: float) -> None:
    at = _decided_at(fold, step, until)
    fold.results.append(None)
    if at is None:
        fold.lost.append(step)
    else:
        _advance(fold, step, at, 0.0)


def _advance(fold: _Fold, step: int, at: float, step_s: float) -> None:
    """Add an advance if the step is beyond the furthest one so far. Redone steps are part of that advance."""
    if fold.advances and step <= fold.advances[-1].step:
        return
    began = fold.advances[-1].ended if fold.advances else at - step_s
    redone_from = step if fold.redone_from is None else fold.redone_from
    fold.advances.append(Advance(step=step, began=began, ended=max(at, began), redone_from=redone_from))
    fold.redone_from = None


def _count(fold: _Fold, microbatches: int) -> Count:
    """Compare the sum of each stage's shares with the step's microbatches. Data instances have no share."""
    lost = doubled = checked = 0
    for result in fold.results:
        sums: dict[int, int] = {}
        for sid, share in result.shares.items() if result is not None else ():
            stage = fold.stage_of.get(sid)
            if stage is not None and not is_data(stage):
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
    """The number of microbatches computed per step, and per step and incarnation, from the claims."""

    units: Mapping[int, int] = field(default_factory=dict)
    by_owner: Mapping[tuple[int, str], int] = field(default_factory=dict)  # (step, incarnation)


def count_work(claims: Iterable[MicrobatchClaim]) -> ComputedWork:
    """Count computed work. A unit is one microbatch, forward and backward, on one stage, whether it counted
    or not.

    Which claim is repeated, and which tells of work done anew, is the accounts' rule as well. Work that was
    only forwarded when its instance died has no claim, so it is not counted.
    """
    steps: dict[int, StepUnits] = {}
    units: dict[int, int] = {}
    by_owner: dict[tuple[int, str], int] = {}
    for claim in claims:
        if claim.evaluate:
            continue
        owner = claim.owner.incarnation
        if steps.setdefault(claim.step, StepUnits()).take(claim) is WorkNovelty.REPEATED:
            continue
        units[claim.step] = units.get(claim.step, 0) + 1
        by_owner[claim.step, owner] = by_owner.get((claim.step, owner), 0) + 1
    return ComputedWork(units=units, by_owner=by_owner)
