"""What the loop remembers of a job, and its rules. Pure.

It remembers what is usual: the times of stages at their best, slots that were left for being slow, and what
was suggested lately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low

from entities.orchestrator.automation.situation import JobSituation
from schemas.actions import SetAlgorithm, SetWindow

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
    move_dwell_s: float = 8.0
    """Of a move to another stage: a module that sees more suggests it sooner."""
    recut_dwell_s: float = 6.0
    """Of a re-cut, which moves more."""
    clear_recut_dwell_s: float = 1.0
    least_left_s: float = 20.0
    """A job that ends sooner is left alone: it would hardly see a verdict."""
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
    renew_s: float = 60.0
    """So long before an algorithm or a window lapses it is suggested again, for it is still right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A remedy that was suggested: until when it is not repeated, and how long the next pause is."""

    until: float
    next_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSetting:
    """An algorithm or a window that the loop has set, and when that lapses."""

    action: SetAlgorithm | SetWindow
    until: float


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
    settings: Mapping[str, LoopSetting] = field(default_factory=dict)
    """What it has set and holds, by the remedy's key."""


def remembered(situation: JobSituation, memory: LoopMemory, now: float, rules: LoopRules) -> LoopMemory:
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
            usual_ms = usual_ms_of(situation, memory, number)
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


def usual_ms_of(situation: JobSituation, memory: LoopMemory, stage: int) -> float:
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
