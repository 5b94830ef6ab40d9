"""`evaluate`: what the orchestrator itself would change of a job, now (ADR-0095). Pure.

Looked for are: degradation (a slot slower than its stage's others, or than itself before), imbalance (a stage
for which all others wait), and routes by an algorithm that does not see speeds. Each remedy has a forecast by
the measured present. It is suggested if it saves a tenth of a step, has done so at every look for a while
(`Dwell`), and gains more in the steps that are left than it costs. The threshold to stay on the list is lower
than that to come onto it, so that noise does not restart the wait. What was declined is not repeated at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from entities.orchestrator.automation.situation import (
    FreeSlot,
    InstanceFigures,
    JobSituation,
    forecast_ms,
    model_ms,
)
from schemas.actions import Action, Migrate, MoveInstance, Recut, SetAlgorithm, SetWeights
from schemas.changes import Forecast
from schemas.recut import cuts_text
from schemas.routing import DEFAULT_ALGORITHM

BLIND = "round-robin"
"""The built-in algorithm that sees neither speeds nor load."""
MINDS_WEIGHTS = "least-outstanding"
"""The one that goes by weights and measures no speed. What users bring along is theirs."""
A_LITTLE = 1.05
"""Times the usual time, at speed 1: less is not worth a look."""
LATE = 1.25
"""Times as long as elsewhere: an instance so slow holds up those that send to it."""
CLEARLY = 1.5
"""The same of each of the latest steps: it need not be watched for long."""
NOISE = 0.2
"""Of the usual time: a larger difference is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRules:
    """When a remedy is suggested. Times in seconds."""

    enters: float = 0.12
    """Share of a step that a remedy must save to be considered. Lower: more changes for less."""
    stays: float = 0.08
    """Below this it is considered no more, and its wait begins again."""
    dwell_s: float = 3.0
    """How long it must have been worth it, by figures that are means of the last eight seconds."""
    clear_dwell_s: float = 1.0
    """The same where each of the latest steps says so, and not only their mean."""
    recut_dwell_s: float = 6.0
    """Of a re-cut, which moves more."""
    clear_recut_dwell_s: float = 2.0
    errors: float = 2.0
    """Standard errors by which an instance must be slower than it would be elsewhere: less may be noise."""
    least_steps: int = 4
    """Steps that must have been measured since anything changed."""
    retry_s: float = 10.0
    """Pause before what was declined is suggested again; it doubles each time."""
    retry_most_s: float = 120.0
    distrust_s: float = 60.0
    """For so long a slot that was left for being slow counts as slow as it was then."""
    reroutes: float = 0.1
    """Share of a stage's work that new weights must move, under an algorithm that does not measure."""
    algorithm_valid_s: float = 600.0
    weights_valid_s: float = 60.0
    weights_renew_s: float = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Something that could be done, in words that hold the figures. `key` is what it is known by."""

    key: str
    action: Action
    reason: str
    saving: float
    dwell_s: float
    net_s: float
    """Seconds that it saves in all, its cost taken off."""
    valid_s: float = 30.0
    confidence: float = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A remedy that was suggested: until when it is not repeated, and how long the next pause is."""

    until: float
    next_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopMemory:
    """What the loop remembers of one job. Never changed in place.

    `since`: from when each remedy has been worth it without a break. `usual_ms`: what a microbatch took each
    stage at speed 1, at its best under this plan. `left`: slots that were left, their share of the usual
    speed then, and when.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    pauses: Mapping[str, Pause] = field(default_factory=dict)
    usual_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)
    rest_ms: Mapping[int, float] = field(default_factory=dict)
    """What a step usually takes beside its stages, by plan: with a slow instance it takes more, since senders
    learn late."""
    left: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    slots: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """SID → its slot at the last look, and the share of the usual speed that it showed there."""
    routed: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The weights that it last suggested, by stage."""


def looks_slow(situation: JobSituation, memory: LoopMemory) -> bool:
    """Whether a free slot might be of use: one that is no faster is not looked for."""
    for number, stage in enumerate(situation.stages):
        usual_ms = _usual_ms(situation, memory, number)
        slowest = max((one.microbatch_ms for one in stage.instances), default=0.0)
        if not usual_ms or slowest > A_LITTLE * usual_ms:
            return True
    return False


def evaluate(
    situation: JobSituation, memory: LoopMemory, now: float, rules: LoopRules = LoopRules()
) -> tuple[tuple[Remedy, ...], LoopMemory]:
    """What is suggested now: at most one change of members or cut, and weights of stages.

    Args:
        situation: the job's.
        memory: what the call before returned.
        now: seconds by any steady clock.
        rules: thresholds and pauses.
    """
    memory = _remembered(situation, memory, now, rules)
    if situation.busy or situation.measured_steps < rules.least_steps:
        return (), replace(memory, since={})
    remedies = [*_remedies(situation, memory, now, rules)]
    worth = {
        remedy.key: memory.since.get(remedy.key, now)
        for remedy in remedies
        if remedy.net_s > 0 and remedy.saving >= (rules.stays if remedy.key in memory.since else rules.enters)
    }
    memory = replace(memory, since=worth)
    ripe = [
        remedy
        for remedy in remedies
        if remedy.key in worth
        and now - worth[remedy.key] >= remedy.dwell_s
        and not _paused(memory, remedy, now)
    ]
    best = sorted(ripe, key=lambda remedy: (-remedy.net_s, remedy.key))[:1]
    weights = [remedy for remedy in _weights(situation, memory, rules) if not _paused(memory, remedy, now)]
    chosen = (*best, *weights)
    for remedy in chosen:
        memory = _suggested(memory, remedy, now, rules)
    return chosen, memory


def adopted(memory: LoopMemory, key: str, rules: LoopRules = LoopRules()) -> LoopMemory:
    """A suggestion was adopted: if it comes up again later that is news."""
    pauses = {
        other: replace(pause, next_s=rules.retry_s) if other == key else pause
        for other, pause in memory.pauses.items()
    }
    return replace(memory, since={}, pauses=pauses)


def _paused(memory: LoopMemory, remedy: Remedy, now: float) -> bool:
    pause = memory.pauses.get(remedy.key)
    return pause is not None and now < pause.until


def _suggested(memory: LoopMemory, remedy: Remedy, now: float, rules: LoopRules) -> LoopMemory:
    if isinstance(remedy.action, SetWeights):  # repeated before it lapses
        pause = Pause(until=now + rules.weights_renew_s, next_s=rules.weights_renew_s)
        memory = replace(memory, routed={**memory.routed, remedy.action.stage: remedy.action.weights})
    else:
        before = memory.pauses.get(remedy.key)
        pause_s = rules.retry_s if before is None else before.next_s
        pause = Pause(until=now + pause_s, next_s=min(2 * pause_s, rules.retry_most_s))
    return replace(memory, pauses={**memory.pauses, remedy.key: pause})


# --- what is remembered ---------------------------------------------------------------------------------
def _remembered(situation: JobSituation, memory: LoopMemory, now: float, rules: LoopRules) -> LoopMemory:
    """The usual times of stages, and slots that instances have left since the last look."""
    usual = {key: best for key, best in memory.usual_ms.items() if key[0] == situation.plan}
    for number, stage in enumerate(situation.stages):
        if stage.instances and situation.measured_steps >= rules.least_steps:
            key = (situation.plan, number)
            present = median_low(one.microbatch_ms * one.speed for one in stage.instances)
            before_ms = usual.get(key, present)
            usual[key] = _followed(before_ms, present, NOISE * before_ms)
    before_ms = memory.rest_ms.get(situation.plan, situation.rest_ms)
    rest_ms = {situation.plan: _followed(before_ms, situation.rest_ms, 0.05 * situation.step_ms)}
    memory = replace(memory, usual_ms=usual, rest_ms=rest_ms)
    left = {slot: entry for slot, entry in memory.left.items() if now - entry[1] < rules.distrust_s}
    slots: dict[str, tuple[str, float]] = {}
    for number, stage in enumerate(situation.stages):
        for one in stage.instances:
            usual_ms = _usual_ms(situation, memory, number)
            share = min(1.0, usual_ms / (one.microbatch_ms * one.speed))
            before = memory.slots.get(one.sid)
            if before is not None and before[0] != one.slot:
                left[before[0]] = (before[1], now)
            slots[one.sid] = (one.slot, share)
            left.pop(one.slot, None)
    return replace(memory, left=left, slots={**memory.slots, **slots})


def _followed(usual_ms: float, present_ms: float, noise_ms: float) -> float:
    """What is usual after one more look: it follows what is faster soon, noise slowly, and slowness never."""
    if present_ms > usual_ms + noise_ms:
        return usual_ms
    return usual_ms + (0.1 if present_ms < usual_ms - noise_ms else 0.03) * (present_ms - usual_ms)


def _usual_ms(situation: JobSituation, memory: LoopMemory, stage: int) -> float:
    """What a microbatch of a stage takes at speed 1: as its best instances show, or showed before."""
    key = (situation.plan, stage)
    usual_ms = memory.usual_ms.get(key, situation.stages[stage].work_ms)
    return usual_ms * _common(situation, memory)


def _common(situation: JobSituation, memory: LoopMemory) -> float:
    """How much longer than usual all stages take, at least half of them: another slot would do so, too."""
    ratios = []
    for number, stage in enumerate(situation.stages):
        usual_ms = memory.usual_ms.get((situation.plan, number))
        if usual_ms and stage.instances:
            ratios.append(median_low(one.microbatch_ms * one.speed for one in stage.instances) / usual_ms)
    if sum(len(stage.instances) for stage in situation.stages) < 2 or not ratios:
        return 1.0  # nobody to compare with
    return median_low(ratios)


# --- remedies ---------------------------------------------------------------------------------------------
def _remedies(situation: JobSituation, memory: LoopMemory, now: float, rules: LoopRules) -> Iterator[Remedy]:
    yield from _migrations(situation, memory, rules)
    if situation.moves:
        yield from _moves(situation, memory, rules)
    if (cut := _recut(situation, rules)) is not None:
        yield cut
    if (algorithm := _algorithm(situation, rules)) is not None:
        yield algorithm


def _changed(situation: JobSituation, stage: int, drop: str, add_ms: float | None) -> list[list[float]]:
    """The times of all instances, without one of this stage, or with another one in its place."""
    times = [list(each) for each in situation.times]
    kept = [one.microbatch_ms for one in situation.stages[stage].instances if one.sid != drop]
    times[stage] = kept if add_ms is None else [*kept, add_ms]
    return times


def _forecast(situation: JobSituation, then_ms: float, cost_ms: float) -> Forecast:
    return Forecast.of(
        situation.step_ms / 1e3,
        max(then_ms, 1e-3) / 1e3,
        cost_s=max(0.0, cost_ms) / 1e3,
        steps_left=situation.steps_left,
    )


def _remedy(
    key: str,
    action: Action,
    forecast: Forecast,
    what: str,
    dwell_s: float,
    situation: JobSituation,
    valid_s: float = 30.0,
) -> Remedy:
    reason = (
        f"{what}: a step would take {forecast.step_after_s:.3f} s instead of {forecast.step_before_s:.3f} s, "
        f"for at most {forecast.cost_s:.1f} s; {forecast.gain_s:.1f} s in the {situation.steps_left} steps "
        "that are left"
    )
    return Remedy(
        key=key,
        action=action,
        reason=reason,
        saving=forecast.saving,
        dwell_s=dwell_s,
        net_s=forecast.gain_s - forecast.cost_s,
        valid_s=valid_s,
    )


def _absence_ms(situation: JobSituation, number: int, sid: str) -> float:
    """What is lost while an instance is away from its stage; the only one of a stage halts all."""
    stage = situation.stages[number]
    if len(stage.instances) < 2:
        return 2 * stage.joins_ms  # it leaves by a checkpoint, which the next one reads
    without_ms = forecast_ms(situation, _changed(situation, number, sid, None))
    return max(0.0, 1 - situation.step_ms / without_ms) * stage.joins_ms


def _open_nodes(situation: JobSituation, memory: LoopMemory) -> dict[str, FreeSlot]:
    """The free slot of each node on which a newcomer may end up, at worst."""
    found: dict[str, FreeSlot] = {}
    for slot in situation.free:
        share = memory.left.get(slot.slot, (1.0, 0.0))[0]
        counted = replace(slot, speed=slot.speed * share)
        if slot.node not in found or counted.speed < found[slot.node].speed:
            found[slot.node] = counted
    return found


def _migrations(situation: JobSituation, memory: LoopMemory, rules: LoopRules) -> Iterator[Remedy]:
    """An instance whose slot is slow goes to the fastest free one."""
    open_nodes = sorted(_open_nodes(situation, memory).values(), key=lambda slot: (-slot.speed, slot.node))
    if not open_nodes:
        return
    goal = open_nodes[0]
    for number, stage in enumerate(situation.stages):
        usual_ms = _usual_ms(situation, memory, number)
        there_ms = usual_ms / goal.speed
        slowest = max(stage.instances, key=lambda one: (one.microbatch_ms, one.sid), default=None)
        if slowest is None or slowest.microbatch_ms - rules.errors * slowest.error_ms <= there_ms:
            continue
        rested = situation
        if slowest.microbatch_ms > LATE * there_ms:  # then what steps take beside it is its doing, too
            rested = replace(situation, rest_ms=min(situation.rest_ms, memory.rest_ms[situation.plan]))
        then_ms = forecast_ms(rested, _changed(situation, number, slowest.sid, there_ms))
        forecast = _forecast(situation, then_ms, _absence_ms(situation, number, slowest.sid))
        what = (
            f"{slowest.sid} takes {slowest.microbatch_ms:.0f} ms for a microbatch, {goal.slot} would take "
            f"{there_ms:.0f} ms"
        )
        action = Migrate(sid=slowest.sid, node=goal.node, forecast=forecast)
        dwell_s = rules.clear_dwell_s if slowest.least_ms > CLEARLY * there_ms else rules.dwell_s
        yield _remedy(f"migrate {slowest.sid}", action, forecast, what, dwell_s, situation)


def _moves(situation: JobSituation, memory: LoopMemory, rules: LoopRules) -> Iterator[Remedy]:
    """An instance that its stage can spare goes to the one that all others wait for."""
    for number, stage in enumerate(situation.stages):
        if len(stage.instances) < 2:
            continue
        for other in range(len(situation.stages)):
            if other == number:
                continue
            for one in _alike(stage.instances):
                share = min(1.0, _usual_ms(situation, memory, number) / (one.microbatch_ms * one.speed))
                there_ms = _usual_ms(situation, memory, other) / (one.speed * share)
                times = _changed(situation, number, one.sid, None)
                times[other] = [*times[other], there_ms]
                cost_ms = _absence_ms(situation, number, one.sid)
                forecast = _forecast(situation, forecast_ms(situation, times), cost_ms)
                what = _shares(situation)
                action = MoveInstance(sid=one.sid, stage=other, forecast=forecast)
                key = f"move from stage {number} to {other}"
                yield _remedy(
                    key,
                    action,
                    forecast,
                    f"{what}; with {one.sid} in stage {other}",
                    rules.dwell_s,
                    situation,
                )


def _alike(instances: Sequence[InstanceFigures]) -> Sequence[InstanceFigures]:
    """The fastest and the slowest: those between bring something between."""
    ranked = sorted(instances, key=lambda one: (one.microbatch_ms, one.sid))
    return ranked if len(ranked) < 3 else (ranked[0], ranked[-1])


def _shares(situation: JobSituation) -> str:
    return ", ".join(
        f"stage {number}: " + " + ".join(f"{time:.0f}" for time in times) + " ms"
        for number, times in enumerate(situation.times)
    )


def _recut(situation: JobSituation, rules: LoopRules) -> Remedy | None:
    """Stages get layers by the speeds that they show."""
    cut = situation.best_cut
    if cut is None or cut.now_ms <= 0:
        return None
    present = replace(situation, step_ms=cut.now_ms)
    forecast = _forecast(present, cut.then_ms, 0.1 * cut.copies_ms + cut.now_ms)
    what = f"{_shares(situation)} for a microbatch; cut {cuts_text(cut.cuts)}"
    action = Recut(cuts=cut.cuts, revision=situation.plan, forecast=forecast)
    dwell_s = rules.clear_recut_dwell_s if cut.clear else rules.recut_dwell_s
    return _remedy("recut", action, forecast, what, dwell_s, situation)


def _algorithm(situation: JobSituation, rules: LoopRules) -> Remedy | None:
    """Turns that do not see that instances differ give way to the default algorithm, which measures."""
    if situation.algorithm != BLIND:
        return None
    stages, count = situation.times, situation.microbatches
    if not all(stages):
        return None
    blind = [max(times) * math.ceil(count / len(times)) for times in stages]
    now_ms = max(blind) + sum(min(times) for times in stages) - min(stages[blind.index(max(blind))])
    then_ms = situation.step_ms * min(1.0, model_ms(stages, count) / now_ms)
    forecast = _forecast(situation, then_ms, 0.0)
    what = f"{_shares(situation)} for a microbatch, which {situation.algorithm} does not see"
    action = SetAlgorithm(algorithm=DEFAULT_ALGORITHM, forecast=forecast)
    return _remedy(
        "algorithm", action, forecast, what, rules.dwell_s, situation, valid_s=rules.algorithm_valid_s
    )


def _weights(situation: JobSituation, memory: LoopMemory, rules: LoopRules) -> Iterator[Remedy]:
    """Weights by speed, for an algorithm that minds weights and does not measure."""
    if situation.algorithm != MINDS_WEIGHTS:
        return
    for number, stage in enumerate(situation.stages):
        speeds = {one.sid: 1.0 / one.microbatch_ms for one in stage.instances}
        if len(speeds) < 2:
            continue
        wanted, present = _parts(speeds), _parts({sid: stage.weights.get(sid, 1.0) for sid in speeds})
        moved = sum(abs(part - present[sid]) for sid, part in wanted.items()) / 2
        weights = {sid: round(len(wanted) * part, 2) for sid, part in wanted.items()}
        if moved < rules.reroutes:
            weights = dict(memory.routed.get(number, {}))  # what holds is to hold on
        if set(weights) != set(speeds):
            continue
        times = ", ".join(f"{one.sid} {one.microbatch_ms:.0f} ms" for one in stage.instances)
        yield Remedy(
            key=f"weights of stage {number}",
            action=SetWeights(stage=number, weights=weights),
            reason=f"{times} for a microbatch, and {situation.algorithm} does not measure",
            saving=moved,
            dwell_s=0.0,
            net_s=0.0,
            valid_s=rules.weights_valid_s,
        )


def _parts(values: Mapping[str, float]) -> dict[str, float]:
    total = sum(values.values()) or 1.0
    return {sid: value / total for sid, value in values.items()}
