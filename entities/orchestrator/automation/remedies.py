"""What could be done about a job's situation, each with its forecast by the measured present. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from entities.orchestrator.automation.loop_memory import LoopMemory, LoopRules, usual_ms_of
from entities.orchestrator.automation.situation import (
    FreeSlot,
    InstanceFigures,
    JobSituation,
    busy_ms,
    forecast_ms,
    model_ms,
)
from schemas.actions import (
    Action,
    Migrate,
    MoveInstance,
    Recut,
    SetAlgorithm,
    SetWeights,
    SetWindow,
    knob_of,
    value_of,
)
from schemas.changes import Forecast
from schemas.recut import cuts_text
from schemas.routing import DEFAULT_ALGORITHM

BLIND = "round-robin"
"""The built-in algorithm that sees neither speeds nor load."""
MINDS_WEIGHTS = "least-outstanding"
"""The one that goes by weights and measures no speed. What users bring along is theirs."""
SAME_PART = 0.01
"""Parts of a stage's work that differ by less are the same: weights are rounded."""
MOST_TIMES = 4
"""The present window: more hides load from the choice of the next hop (`planning.window_room`)."""
RECUT = "recut"
"""The key of a re-cut."""
LATE = 1.25
"""Times as long as elsewhere: an instance so slow holds up those that send to it."""
CLEARLY = 1.5
"""The same of each of the latest steps: it need not be watched for long."""


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
    total_s: float = 0.0
    """Seconds until the job ends, by its forecast. By these remedies are compared, and not by what they save:
    some count that from the mean of the latest seconds, others from the last step."""
    valid_s: float = 30.0
    confidence: float = 0.8
    renews: bool = False
    """It is so already, by the loop's own doing, and is to hold on."""


def remedies_for(situation: JobSituation, memory: LoopMemory, rules: LoopRules) -> Iterator[Remedy]:
    """All changes that could be made, whether they are worth it or not."""
    yield from migrations(situation, memory, rules)
    if situation.moves:
        yield from _moves(situation, memory, rules)
    if (cut := _recut(situation, rules)) is not None:
        yield cut
    if (algorithm := _algorithm(situation, rules)) is not None:
        yield algorithm
    yield from _windows(situation, rules)


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
        total_s=forecast.step_after_s * situation.steps_left + forecast.cost_s,
        valid_s=valid_s,
    )


def _saves(situation: JobSituation, then_ms: float, rules: LoopRules) -> bool:
    """Whether it may be worth a look; most are not, and a forecast in words costs more than its figures."""
    return then_ms <= (1 - rules.stays) * situation.step_ms


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


def migrations(situation: JobSituation, memory: LoopMemory, rules: LoopRules) -> Iterator[Remedy]:
    """An instance whose slot is slow goes to the fastest free one."""
    open_nodes = sorted(_open_nodes(situation, memory).values(), key=lambda slot: (-slot.speed, slot.node))
    if not open_nodes:
        return
    goal = open_nodes[0]
    for number, stage in enumerate(situation.stages):
        usual_ms = usual_ms_of(situation, memory, number)
        there_ms = usual_ms / goal.speed
        slowest = max(stage.instances, key=lambda one: (one.microbatch_ms, one.sid), default=None)
        if slowest is None or not usual_ms:
            continue
        clear = slowest.least_ms > CLEARLY * there_ms
        if not clear and slowest.microbatch_ms - rules.errors * slowest.error_ms <= there_ms:
            continue
        rested = situation
        if slowest.microbatch_ms > LATE * there_ms:  # then what steps take beside it is its doing, too
            usual_rest_ms = memory.rest_ms.get(situation.plan, situation.rest_ms)
            rested = replace(situation, rest_ms=min(situation.rest_ms, usual_rest_ms))
        then_ms = forecast_ms(rested, _changed(situation, number, slowest.sid, there_ms))
        if not _saves(situation, then_ms, rules):
            continue
        forecast = _forecast(situation, then_ms, _absence_ms(situation, number, slowest.sid))
        what = (
            f"{slowest.sid} takes {slowest.microbatch_ms:.0f} ms for a microbatch, {goal.slot} would take "
            f"{there_ms:.0f} ms"
        )
        action = Migrate(sid=slowest.sid, node=goal.node, forecast=forecast)
        dwell_s = rules.clear_dwell_s if clear else rules.dwell_s
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
                share = min(1.0, usual_ms_of(situation, memory, number) / (one.microbatch_ms * one.speed))
                there_ms = usual_ms_of(situation, memory, other) / (one.speed * share)
                times = _changed(situation, number, one.sid, None)
                times[other] = [*times[other], there_ms]
                then_ms = forecast_ms(situation, times)
                if not _saves(situation, then_ms, rules):
                    continue
                forecast = _forecast(situation, then_ms, _absence_ms(situation, number, one.sid))
                what = _shares(situation)
                action = MoveInstance(sid=one.sid, stage=other, forecast=forecast)
                key = f"move from stage {number} to {other}"
                yield _remedy(
                    key,
                    action,
                    forecast,
                    f"{what}; with {one.sid} in stage {other}",
                    rules.move_dwell_s,
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
    return _remedy(RECUT, action, forecast, what, dwell_s, situation)


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


def _windows(situation: JobSituation, rules: LoopRules) -> Iterator[Remedy]:
    """A larger window where links are so slow that a stage waits for microbatches that may not be sent yet.

    A microbatch is open at a receiver until its gradient is back: its way through this and all later stages.
    """
    times, microbatches = situation.times, situation.microbatches
    if not all(times):
        return
    busy = [busy_ms(each, microbatches) for each in times]
    for number, stage in enumerate(situation.stages):
        if number == 0 or not stage.window or not stage.link_ms:
            continue
        later = range(number, len(times))
        open_ms = sum(min(times[each]) + 2 * situation.stages[each].link_ms for each in later)
        senders, takes_ms = len(times[number - 1]), min(times[number])
        wanted = math.ceil(open_ms / (takes_ms * senders))
        starved = open_ms / (takes_ms * senders * stage.window)
        lost_ms = min(busy[number] * starved - max(busy), situation.rest_ms)
        if wanted <= stage.window or lost_ms <= 0:
            continue
        in_flight = min(wanted, MOST_TIMES * stage.window)
        lost_ms *= min(1.0, (in_flight - stage.window) / (wanted - stage.window))
        forecast = _forecast(situation, situation.step_ms - lost_ms, 0.0)
        what = (
            f"a transfer into stage {number} takes {stage.link_ms:.0f} ms, so that a microbatch is open for "
            f"{open_ms:.0f} ms, and {stage.window} may be at a time"
        )
        action = SetWindow(stage=number, in_flight=in_flight, forecast=forecast)
        key, valid_s = f"window of stage {number}", rules.algorithm_valid_s
        yield _remedy(key, action, forecast, what, rules.dwell_s, situation, valid_s=valid_s)


def weights_for(situation: JobSituation, memory: LoopMemory, rules: LoopRules) -> Iterator[Remedy]:
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
            key=weights_key(number),
            action=SetWeights(stage=number, weights=weights),
            reason=f"{times} for a microbatch, and {situation.algorithm} does not measure",
            saving=moved,
            dwell_s=0.0,
            net_s=0.0,
            valid_s=rules.weights_valid_s,
        )


def kept_weights(situation: JobSituation, memory: LoopMemory, rules: LoopRules) -> Iterator[Remedy]:
    """The weights that the loop has set and that are in force, for while nothing else may be changed."""
    if situation.algorithm != MINDS_WEIGHTS:
        return
    for number, stage in enumerate(situation.stages):
        weights = memory.routed.get(number, {})
        sids = {one.sid for one in stage.instances}
        if not weights or weights.keys() != sids:
            continue
        wanted, present = _parts(weights), _parts({sid: stage.weights.get(sid, 1.0) for sid in sids})
        if any(abs(part - present[sid]) > SAME_PART for sid, part in wanted.items()):
            continue
        yield Remedy(
            key=weights_key(number),
            action=SetWeights(stage=number, weights=weights),
            reason="what holds is to hold on while another change is being judged",
            saving=0.0,
            dwell_s=0.0,
            net_s=0.0,
            valid_s=rules.weights_valid_s,
            renews=True,
        )


def renewals(memory: LoopMemory, now: float, rules: LoopRules) -> Iterator[Remedy]:
    """The algorithm and windows that the loop has set, that hold, and that would lapse before long."""
    for key, setting in memory.settings.items():
        if setting.until - now > rules.renew_s:
            continue
        action = setting.action
        yield Remedy(
            key=key,
            action=action,
            reason=f"{knob_of(action)} is {value_of(action)}, and is to be so on",
            saving=0.0,
            dwell_s=0.0,
            net_s=0.0,
            valid_s=rules.algorithm_valid_s,
            renews=True,
        )


def is_so(situation: JobSituation, action: SetAlgorithm | SetWindow) -> bool:
    """Whether this is in force."""
    if isinstance(action, SetAlgorithm):
        return situation.algorithm == action.algorithm
    stages = situation.stages
    return action.stage < len(stages) and stages[action.stage].window == action.in_flight


def weights_key(stage: int) -> str:
    """What the weights of a stage are known by."""
    return f"weights of stage {stage}"


def _parts(values: Mapping[str, float]) -> dict[str, float]:
    total = sum(values.values()) or 1.0
    return {sid: value / total for sid, value in values.items()}
