"""How the instances of a job leave machines that go away at a deadline (ADR-0171). Pure.

    stage         who is noticed                  how they leave
    --------------------------------------------------------------------------------------------------------
    below 0       any                             at rest: gateways dispatch to them from a decision on
    others        not all with the state          go: at the next decision; the others go on
    others        the only one                    successor: another one takes the state first, then it goes
    others        several, and nobody else        all but one go; that one waits for their newcomers
    others        all, and no room or no time     checkpoint: of the step at whose end training rests, then
                                                  all of them go at once and the stage restores it
    others        … and the step ends too late    interrupt: the same, at the beginning of the open step
    others        any, no room, and much time     wait: they go on until there is room, or time gets short

Stages that would lose their state come first. No time: what is left is less than a state needs to get to a
newcomer; so a state that is larger than rate × deadline is written at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from schemas.task_graph import is_data


class Way(StrEnum):
    """How an instance leaves."""

    INTERRUPT = "interrupt"
    CHECKPOINT = "checkpoint"
    SUCCESSOR = "successor"
    WAIT = "wait"
    GO = "go"
    REST = "rest"


URGENCY = (Way.INTERRUPT, Way.CHECKPOINT, Way.SUCCESSOR, Way.WAIT, Way.GO, Way.REST)
"""In which order instances are looked after: those whose stage would lose its state come first."""


@dataclass(frozen=True, kw_only=True)
class LeaveTimes:
    """What is assumed of a leave, in seconds."""

    margin_s: float = 5.0
    """Before the deadline all must be over: instances get a moment to end, and clocks differ."""
    start_s: float = 3.0
    """From the order until a newcomer has built its stage, without its state."""
    checkpoint_s: float = 3.0
    """What a checkpoint takes before one was measured."""
    patience_s: float = 60.0
    """With so much time beside that of two steps and a checkpoint whoever finds no room goes on where it is:
    a machine may come meanwhile."""
    interrupt_s: float = 1.0
    """What it takes to begin a step again: one that ends sooner is awaited."""


@dataclass(frozen=True, kw_only=True)
class Leaver:
    """An instance on a machine that goes away.

    `left_s`: until then. `joined`: it has the state of its stage. `memory_bytes`: at most so large is that.
    `no_room`: why it finds no place on another machine now; empty if it does, or if a successor has one.
    """

    sid: str
    stage: int
    left_s: float
    joined: bool = True
    memory_bytes: int = 0
    no_room: str = ""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is known of a job's pace. Unknown figures are None.

    `open_s`: for how long the present step has been open. `bytes_per_s`: of the slowest link of the machines
    that leave. `checkpoint_step`: of the newest checkpoint.
    """

    step: int
    open_s: float = 0.0
    step_s: float | None = None
    checkpoint_s: float | None = None
    bytes_per_s: float | None = None
    checkpoint_step: int | None = None


@dataclass(frozen=True)
class Leave:
    """How one instance leaves; `reason` in words, with what is lost if the deadline comes first."""

    sid: str
    way: Way
    reason: str


def plan_leave(
    leavers: Iterable[Leaver],
    staying: Mapping[int, int],
    coming: Mapping[int, int],
    outlook: Outlook,
    times: LeaveTimes = LeaveTimes(),
) -> tuple[Leave, ...]:
    """How these instances leave, the most urgent first; all that leave with notice, of one job.

    Args:
        leavers: present instances on machines that go away.
        staying: by stage, members with the state of the open step on machines that stay.
        coming: by stage, newcomers on their way to such machines.
        outlook: the job's pace.
        times: what is assumed.
    """
    stages: dict[int, list[Leaver]] = {}
    for leaver in sorted(leavers, key=lambda leaver: leaver.sid):
        stages.setdefault(leaver.stage, []).append(leaver)
    leaves = [
        leave
        for stage, crew in sorted(stages.items())
        for leave in _of_stage(stage, crew, staying.get(stage, 0), coming.get(stage, 0), outlook, times)
    ]
    return tuple(sorted(leaves, key=lambda leave: (URGENCY.index(leave.way), leave.sid)))


def _of_stage(
    stage: int, crew: Sequence[Leaver], staying: int, coming: int, outlook: Outlook, times: LeaveTimes
) -> list[Leave]:
    if is_data(stage):
        return [Leave(leaver.sid, Way.REST, "leaves while training rests") for leaver in crew]
    reason = "leaves at the end of the open step: it has no state yet"
    leaves = [Leave(leaver.sid, Way.GO, reason) for leaver in crew if not leaver.joined]
    crew = [leaver for leaver in crew if leaver.joined]
    patient = [leaver for leaver in crew if leaver.no_room and _has_time(leaver, outlook, times)]
    if staying or (len(patient) == len(crew) and not coming):
        crew = [leaver for leaver in crew if leaver not in patient]
        reason = "goes on until there is room elsewhere or little time is left"
        leaves += [Leave(leaver.sid, Way.WAIT, f"{reason}: {leaver.no_room}") for leaver in patient]
    if staying or not crew:
        reason = f"leaves at the end of the open step: {staying} of stage {stage} go on"
        return [*leaves, *(Leave(leaver.sid, Way.GO, reason) for leaver in crew)]
    if why := _why_no_newcomer(crew, coming, outlook, times):
        way, risk = _by_checkpoint(min(leaver.left_s for leaver in crew), outlook, times)
        which = "alone in" if len(crew) == 1 else f"one of all {len(crew)} of"
        reason = f"{which} stage {stage}, and {why}: {risk}"
        return [*leaves, *(Leave(leaver.sid, way, reason) for leaver in crew)]
    *first, last = crew
    reason = f"leaves at the end of the open step: {last.sid} keeps stage {stage}"
    leaves += [Leave(leaver.sid, Way.GO, reason) for leaver in first]
    way = Way.WAIT if coming or first else Way.SUCCESSOR
    return [*leaves, Leave(last.sid, way, f"leaves once a newcomer has the state of stage {stage}")]


def _has_time(leaver: Leaver, outlook: Outlook, times: LeaveTimes) -> bool:
    """Whether its stage may be looked after later as well."""
    needed_s = times.margin_s + 2 * (outlook.step_s or 0.0) + _checkpoint_s(outlook, times)
    return leaver.left_s > times.patience_s + needed_s


def _why_no_newcomer(crew: Sequence[Leaver], coming: int, outlook: Outlook, times: LeaveTimes) -> str:
    """Why no newcomer could have the state of this stage in time; empty if one could."""
    if not coming and all(leaver.no_room for leaver in crew):  # who comes may have taken the last slot
        return crew[0].no_room
    left_s = min(leaver.left_s for leaver in crew) - times.margin_s
    state_bytes = max(leaver.memory_bytes for leaver in crew)
    sent_s = state_bytes / outlook.bytes_per_s if outlook.bytes_per_s else 0.0
    joins_s = times.start_s + sent_s + 2 * (outlook.step_s or 0.0)  # it joins at the end of a step
    if joins_s + _checkpoint_s(outlook, times) <= left_s:  # else nothing would be left for a second way
        return ""
    rate = f"{state_bytes / 1e9:.3g} GB at {(outlook.bytes_per_s or 0.0) / 1e6:.3g} MB/s"
    sends = f" ({rate})" if sent_s >= 1 else ""
    return f"a newcomer needs {joins_s:.0f} s{sends} of the {max(0.0, left_s):.0f} s that are left"


def _by_checkpoint(left_s: float, outlook: Outlook, times: LeaveTimes) -> tuple[Way, str]:
    """Whether the open step is awaited, and in words what is saved, and what is lost otherwise."""
    before = outlook.checkpoint_step or 0
    lost = f"or else steps since {before} are computed again"
    ends_s = max(0.0, (outlook.step_s or 0.0) - outlook.open_s)
    late = ends_s + _checkpoint_s(outlook, times) > left_s - times.margin_s
    if late and ends_s > times.interrupt_s:
        ends = f"step {outlook.step} would end in {ends_s:.0f} s"
        return Way.INTERRUPT, f"{ends}, so it is begun again after a checkpoint of its beginning, {lost}"
    return Way.CHECKPOINT, f"after a checkpoint of the next step, {lost}"


def _checkpoint_s(outlook: Outlook, times: LeaveTimes) -> float:
    return times.checkpoint_s if outlook.checkpoint_s is None else outlook.checkpoint_s
