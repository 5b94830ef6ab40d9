"""Which instance should change its stage, and the expected effect. Pure.

A pipeline is as fast as its slowest stage: the throughput is at most the minimum over stages of the sum of
their instances' speeds. So only a move into the slowest stage can help, and one move at a time is enough: the
next one is decided after the effect of the last (SWARM, Ryabinin et al. 2023, §3.2, adaptive rebalancing;
here by measured service times instead of queue sizes).

A step ends with its last microbatch, so a stage's time is not microbatches / speed but the makespan of whole
microbatches: six on four equal instances take as long as on three. The rest of a step's time (filling the
pipeline, reducing, committing) is assumed to stay the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from schemas.changes import Forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A working instance and its measured milliseconds per microbatch, forward plus backward."""

    sid: str
    service_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSituation:
    """One stage. Standbys are not among its workers: they neither count as replicas nor move.

    `cost_ms`: milliseconds per microbatch in the analysis, all stages on the same machine; 0 if unknown.
    `state_bytes`: bytes that a newcomer is sent.
    """

    workers: tuple[Worker, ...]
    cost_ms: float = 0.0
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A job at one moment. `step_s`: measured time of a step; `bytes_per_s`: measured transfer rate."""

    stages: Mapping[int, StageSituation]
    microbatches: int
    step_s: float
    steps_left: int
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveLimits:
    """When a move is worth it."""

    min_improvement: float = 0.1
    """Share of a step's time that must be saved. A smaller one moves more often, also because of noise."""

    margin: float = 2.0
    """How many times its cost a move must gain over the remaining steps."""

    assumed_bytes_per_s: float = 5e7
    """Transfer rate if none has been measured."""

    start_s: float = 1.0
    """Seconds until a started instance can take the state, without the transfer."""

    contradiction: float = 1.5
    """Service times are ignored if they imply a step of this many times its measured time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The best move. `service_ms`: the expected time per microbatch of the mover in its new stage.

    `bound_before`, `bound_after`: microbatches per second of the slowest stage at most.
    """

    sid: str
    from_stage: int
    to_stage: int
    service_ms: float
    bound_before: float
    bound_after: float
    forecast: Forecast


def best_move(situation: Situation, limits: MoveLimits) -> Proposal | str:
    """The single move that shortens a step most, or the reason why none is worth it."""
    doubt = _doubt(situation)
    if doubt:
        return doubt
    stages = situation.stages
    spans = {stage: makespan_ms(_times(state), situation.microbatches) for stage, state in stages.items()}
    slowest = max(stages, key=lambda stage: (spans[stage], -stage))
    model_s = spans[slowest] / 1e3
    if model_s > limits.contradiction * situation.step_s:
        return (
            f"contradictory: by its service times stage {slowest} needs {model_s:.3f} s a step, "
            f"which takes {situation.step_s:.3f} s"
        )
    candidates = [
        _candidate(stages, donor, slowest)
        for donor in stages
        if donor != slowest and _can_give(stages[donor])
    ]
    if not candidates:
        return f"stage {slowest} is the slowest, and no other has a replica to spare"
    proposals = [_proposal(situation, limits, spans, slowest, *candidate) for candidate in candidates]
    best = min(proposals, key=lambda proposal: (proposal.forecast.step_after_s, proposal.sid))
    return _objection(best.forecast, limits) or best


def improvement(
    stages: Mapping[int, StageSituation], sid: str, to_stage: int, microbatches: int
) -> float | None:
    """Share of the slowest stage's time that this move saves; negative if it costs. None: unknown."""
    matches = [
        (stage, worker) for stage, state in stages.items() for worker in state.workers if worker.sid == sid
    ]
    if not matches or to_stage not in stages or microbatches < 1:
        return None
    giving, mover = matches[0]
    if giving == to_stage or not _can_give(stages[giving]):
        return None
    if not all(state.workers and all(map(_sound, _times(state))) for state in stages.values()):
        return None
    before = max(makespan_ms(_times(state), microbatches) for state in stages.values())
    moved = _with_moved(stages, giving, to_stage, mover)
    after = max(makespan_ms(_times(state), microbatches) for state in moved.values())
    return 1.0 - after / before


def throughput_bound(stages: Mapping[int, StageSituation]) -> float:
    """Microbatches per second of all workers of the slowest stage: the upper bound of any schedule."""
    return 1e3 * min(_speed(state) for state in stages.values())


def makespan_ms(times: Sequence[float], microbatches: int) -> float:
    """Milliseconds until all microbatches are done, if each goes to the worker that would finish it first.

    Args:
        times: Milliseconds per microbatch of each worker, above 0.
        microbatches: Number of microbatches.
    """
    even = microbatches / sum(1.0 / time for time in times)  # lower bound: all workers are busy to the end
    whole = [math.floor(even / time) for time in times]  # microbatches that each has done by then
    finish = [((done + 1) * time, time) for done, time in zip(whole, times, strict=True)]
    heapq.heapify(finish)
    last = max(done * time for done, time in zip(whole, times, strict=True))
    for _ in range(microbatches - sum(whole)):
        at, time = finish[0]
        last = max(last, at)
        heapq.heapreplace(finish, (at + time, time))
    return last


def _doubt(situation: Situation) -> str:
    """The missing or absurd measurement, in words; empty if all can be used."""
    if len(situation.stages) < 2:
        return "there is only one stage"
    if not (situation.microbatches >= 1 and _sound(situation.step_s)):
        return f"no step time yet ({situation.step_s} s, {situation.microbatches} microbatches)"
    if situation.steps_left < 1:
        return "the job is at its end"
    for stage, state in situation.stages.items():
        if not state.workers:
            return f"stage {stage} has nobody"
        for worker in state.workers:
            if not _sound(worker.service_ms):
                return f"{worker.sid} has no service time that could be believed ({worker.service_ms} ms)"
    return ""


def _objection(forecast: Forecast, limits: MoveLimits) -> str:
    """Why a move is not worth it; empty if it is."""
    if forecast.improvement < limits.min_improvement:
        return f"the best move would save {max(0.0, forecast.improvement):.0%} of a step"
    if forecast.gain_s < limits.margin * forecast.cost_s:
        return (
            f"the best move would gain {forecast.gain_s:.1f} s in {forecast.steps_left} steps "
            f"and cost {forecast.cost_s:.1f} s"
        )
    return ""


def _can_give(state: StageSituation) -> bool:
    return len(state.workers) > 1


def _candidate(
    stages: Mapping[int, StageSituation], donor: int, taker: int
) -> tuple[int, Worker, Mapping[int, StageSituation]]:
    """The donor stage, its worker that is best moved to `taker` (as fast as there), and the stages then."""
    giving, taking = stages[donor], stages[taker]
    ratio = _cost_ratio(giving, taking)

    def worth(worker: Worker) -> tuple[float, str]:
        rest = _speed(giving) - 1.0 / worker.service_ms
        return min(rest, _speed(taking) + 1.0 / (worker.service_ms * ratio)), worker.sid

    mover = max(giving.workers, key=worth)
    after = _with_moved(stages, donor, taker, mover)
    return donor, after[taker].workers[-1], after


def _with_moved(
    stages: Mapping[int, StageSituation], donor: int, taker: int, mover: Worker
) -> dict[int, StageSituation]:
    """The stages after the move, with `mover` the last worker of `taker`, as fast as it would be there."""
    giving, taking = stages[donor], stages[taker]
    arrival = replace(mover, service_ms=mover.service_ms * _cost_ratio(giving, taking))
    return {
        **stages,
        donor: replace(giving, workers=tuple(worker for worker in giving.workers if worker is not mover)),
        taker: replace(taking, workers=(*taking.workers, arrival)),
    }


def _cost_ratio(giving: StageSituation, taking: StageSituation) -> float:
    """How many times as long the same device takes for a microbatch of the other stage.

    It follows from the analysed costs, which were all measured on one machine. Without them it follows from
    the stages' median service times, as if their devices were equal.
    """
    if _sound(giving.cost_ms) and _sound(taking.cost_ms):
        return taking.cost_ms / giving.cost_ms
    return median(_times(taking)) / median(_times(giving))


def _proposal(
    situation: Situation,
    limits: MoveLimits,
    spans: Mapping[int, float],
    taker: int,
    donor: int,
    mover: Worker,
    after: Mapping[int, StageSituation],
) -> Proposal:
    changed = {stage: makespan_ms(_times(after[stage]), situation.microbatches) for stage in (donor, taker)}
    model_before_s = spans[taker] / 1e3
    model_after_s = max({**spans, **changed}.values()) / 1e3
    factor = min(1.0, situation.step_s / model_before_s)  # scales a model above the measured step to it
    step_after_s = situation.step_s - factor * (model_before_s - model_after_s)
    rate = situation.bytes_per_s if _sound(situation.bytes_per_s) else limits.assumed_bytes_per_s
    forecast = Forecast.of(
        situation.step_s,
        step_after_s,
        cost_s=limits.start_s + situation.stages[taker].state_bytes / rate,
        steps_left=situation.steps_left,
    )
    return Proposal(
        sid=mover.sid,
        from_stage=donor,
        to_stage=taker,
        service_ms=mover.service_ms,
        bound_before=throughput_bound(situation.stages),
        bound_after=throughput_bound(after),
        forecast=forecast,
    )


def _times(state: StageSituation) -> list[float]:
    return [worker.service_ms for worker in state.workers]


def _speed(state: StageSituation) -> float:
    """Microbatches per millisecond."""
    return sum(1.0 / worker.service_ms for worker in state.workers)


def _sound(value: float) -> bool:
    return math.isfinite(value) and value > 0
