"""`evaluate`: what the orchestrator itself would change of a job, now (ADR-0095). Pure.

Looked for are: degradation (a slot slower than its stage's others, or than itself before), imbalance (a stage
for which all others wait), delay (a link that outgrows its window), and routes by an algorithm that does not
see speeds. A remedy is suggested if it saves enough of a step by its forecast, has done so at every look for
a while, and gains more in the steps that are left than it costs. The threshold to stay on the list is lower
than that to come onto it, so that noise does not restart the wait. What was declined is not repeated at once.
"""

from __future__ import annotations

from dataclasses import replace

from entities.orchestrator.automation.loop_memory import (
    LoopMemory,
    LoopRules,
    Pause,
    remembered,
)
from entities.orchestrator.automation.remedies import Remedy, migrations, remedies_for, weights_for
from entities.orchestrator.automation.situation import FreeSlot, JobSituation
from schemas.actions import SetWeights

ABOUT_BEST = 1.05
"""Times what the job takes by the best remedy: a worse one is not suggested because it has waited longer."""


def gains_elsewhere(situation: JobSituation, memory: LoopMemory, fastest: float, rules: LoopRules) -> bool:
    """Whether an instance might be worth a slot of this speed: if not, no free one is looked for."""
    ideal = FreeSlot(slot="any", node="any", speed=fastest)
    return any(migrations(replace(situation, free=(ideal,)), memory, rules))


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
    memory = remembered(situation, memory, now, rules)
    ends_soon = situation.steps_left * situation.step_ms < 1e3 * rules.least_left_s
    if situation.busy or ends_soon or situation.measured_steps < rules.least_steps:
        return (), replace(memory, since={})
    remedies = [*remedies_for(situation, memory, rules)]
    worth = {
        remedy.key: memory.since.get(remedy.key, now)
        for remedy in remedies
        if remedy.net_s > 0 and remedy.saving >= (rules.stays if remedy.key in memory.since else rules.enters)
    }
    memory = replace(memory, since=worth)
    able = [remedy for remedy in remedies if remedy.key in worth and not _paused(memory, remedy, now)]
    best_s = min((remedy.total_s for remedy in able), default=0.0)
    ripe = [
        remedy
        for remedy in able
        if now - worth[remedy.key] >= remedy.dwell_s and remedy.total_s <= ABOUT_BEST * best_s
    ]
    best = sorted(ripe, key=lambda remedy: (remedy.total_s, remedy.key))[:1]
    weights = [remedy for remedy in weights_for(situation, memory, rules) if not _paused(memory, remedy, now)]
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
