"""Which instance should change its stage, and what that would bring. Pure.

A pipeline is as fast as its slowest stage: the throughput is at most the minimum over stages of the sum of
their instances' speeds. So only a move into the slowest stage can help, and one move at a time is enough: the
next is judged by what the last one did (SWARM, Ryabinin et al. 2023, §3.2, adaptive rebalancing; here by
measured service times instead of queue sizes).

A step ends when its last microbatch does, so a stage's time is not microbatches / speed but the makespan of
whole microbatches: six on four equal instances take as long as on three. What a step takes beyond its slowest
stage (filling the pipeline, reducing, committing) is taken to stay as it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from schemas.stage_move import MoveForecast

SLOW_BYTES_PER_S = 5e7
"""Taken for transfers where none has been measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """A working instance and its measured milliseconds per microbatch, forward plus backward."""

    sid: str
    service_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSituation:
    """One stage. Standbys are not among its workers: they neither count as replicas nor move.

    `cost_ms`: per microbatch as analysed, all stages on the same machine; 0 if not known.
    `state_bytes`: what a newcomer is sent.
    """

    workers: tuple[Worker, ...]
    cost_ms: float = 0.0
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A job at one moment. `step_s`: a step as measured; `bytes_per_s`: of transfers between instances."""

    stages: Mapping[int, StageSituation]
    microbatches: int
    step_s: float
    steps_left: int
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveLimits:
    """When a move is worth it."""

    min_improvement: float = 0.1
    """Part of a step's time that must be saved. Smaller moves more often, also for noise."""

    margin: float = 2.0
    """How many times its cost a move must gain over the steps that are left."""

    start_s: float = 1.0
    """Seconds until an instance that is started is there to take the state, beside the transfer."""

    contradiction: float = 1.5
    """Service times that say a step takes this many times as long as it does are not believed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The best move. `service_ms`: expected of the mover in its new stage, per microbatch.

    `bound_before`, `bound_after`: microbatches per second that the slowest stage can do.
    """

    sid: str
    from_stage: int
    to_stage: int
    service_ms: float
    bound_before: float
    bound_after: float
    forecast: MoveForecast


def best_move(situation: Situation, limits: MoveLimits) -> Proposal | str:
    """The single move that shortens a step most, or why there is none that is worth it."""
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
        _moved(stages, donor, slowest) for donor in stages if donor != slowest and _can_give(stages[donor])
    ]
    if not candidates:
        return f"stage {slowest} is the slowest, and no other has a replica to spare"
    proposals = [_proposal(situation, limits, spans, slowest, *candidate) for candidate in candidates]
    best = min(proposals, key=lambda one: (one.forecast.step_after_s, one.sid))
    return _objection(best.forecast, limits) or best


def improvement(
    stages: Mapping[int, StageSituation], sid: str, to_stage: int, microbatches: int
) -> float | None:
    """Part of the slowest stage's time that this move saves; negative if it costs. None: it can't be said."""
    found = [
        (stage, worker) for stage, state in stages.items() for worker in state.workers if worker.sid == sid
    ]
    if not found or to_stage not in stages or microbatches < 1:
        return None
    giving, mover = found[0]
    if giving == to_stage or not _can_give(stages[giving]):
        return None
    if not all(state.workers and all(map(_sound, _times(state))) for state in stages.values()):
        return None
    before = max(makespan_ms(_times(state), microbatches) for state in stages.values())
    moved = _with_moved(stages, giving, to_stage, mover)
    after = max(makespan_ms(_times(state), microbatches) for state in moved.values())
    return 1.0 - after / before


def throughput_bound(stages: Mapping[int, StageSituation]) -> float:
    """Microbatches per second of the slowest stage, all its workers together: no schedule does more."""
    return 1e3 * min(_speed(state) for state in stages.values())


def makespan_ms(times: Sequence[float], microbatches: int) -> float:
    """Milliseconds until whole microbatches are done, handed out to whoever is done with it first.

    Args:
        times: milliseconds per microbatch of each worker, above 0.
        microbatches: how many there are.
    """
    even = microbatches / sum(1.0 / time for time in times)  # all work to the end: nothing is faster
    whole = [math.floor(even / time) for time in times]  # each has done so many by then, or before
    finish = [((done + 1) * time, time) for done, time in zip(whole, times, strict=True)]
    heapq.heapify(finish)
    last = max(done * time for done, time in zip(whole, times, strict=True))
    for _ in range(microbatches - sum(whole)):
        at, time = finish[0]
        last = max(last, at)
        heapq.heapreplace(finish, (at + time, time))
    return last


def _doubt(situation: Situation) -> str:
    """What is missing or absurd in the measurements; empty if they can be used."""
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


def _objection(forecast: MoveForecast, limits: MoveLimits) -> str:
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


def _moved(
    stages: Mapping[int, StageSituation], donor: int, taker: int
) -> tuple[int, Worker, Mapping[int, StageSituation]]:
    """The worker of `donor` that is best moved to `taker`, as it would be there, and the stages then."""
    giving, taking = stages[donor], stages[taker]
    ratio = _cost_ratio(giving, taking)

    def worth(worker: Worker) -> tuple[float, str]:
        left = _speed(giving) - 1.0 / worker.service_ms
        return min(left, _speed(taking) + 1.0 / (worker.service_ms * ratio)), worker.sid

    mover = max(giving.workers, key=worth)
    after = _with_moved(stages, donor, taker, mover)
    return donor, after[taker].workers[-1], after


def _with_moved(
    stages: Mapping[int, StageSituation], donor: int, taker: int, mover: Worker
) -> dict[int, StageSituation]:
    """The stages with `mover` the last worker of `taker`, as fast as it would be there."""
    giving, taking = stages[donor], stages[taker]
    there = replace(mover, service_ms=mover.service_ms * _cost_ratio(giving, taking))
    return {
        **stages,
        donor: replace(giving, workers=tuple(one for one in giving.workers if one is not mover)),
        taker: replace(taking, workers=(*taking.workers, there)),
    }


def _cost_ratio(giving: StageSituation, taking: StageSituation) -> float:
    """How many times as long the same device takes for a microbatch of the other stage.

    By the analysed costs, for which all stages were measured on one machine. Without them the stages' median
    service times must do, as if their devices were alike.
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
    there: Worker,
    after: Mapping[int, StageSituation],
) -> Proposal:
    changed = {stage: makespan_ms(_times(after[stage]), situation.microbatches) for stage in (donor, taker)}
    model_before_s = spans[taker] / 1e3
    model_after_s = max({**spans, **changed}.values()) / 1e3
    part = min(1.0, situation.step_s / model_before_s)  # a model above the measured step is scaled to it
    step_after_s = situation.step_s - part * (model_before_s - model_after_s)
    rate = situation.bytes_per_s if _sound(situation.bytes_per_s) else SLOW_BYTES_PER_S
    forecast = MoveForecast(
        step_before_s=situation.step_s,
        step_after_s=step_after_s,
        cost_s=limits.start_s + situation.stages[taker].state_bytes / rate,
        gain_s=(situation.step_s - step_after_s) * situation.steps_left,
        steps_left=situation.steps_left,
    )
    return Proposal(
        sid=there.sid,
        from_stage=donor,
        to_stage=taker,
        service_ms=there.service_ms,
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
