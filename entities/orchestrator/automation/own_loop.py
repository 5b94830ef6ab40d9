"""`evaluate`: what the orchestrator itself would change of a job, now (ADR-0095). Pure.

Looked for are: degradation (a slot slower than its stage's others, or than itself before), imbalance (a stage
for which all others wait), delay (a link that outgrows its window), and routes by an algorithm that does not
see speeds. A remedy is suggested if it saves enough of a step by its forecast, has done so at every look for
a while, and gains more in the steps that are left than it costs. The threshold to stay on the list is lower
than that to come onto it, so that noise does not restart the wait. What was declined is not repeated at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from entities.orchestrator.automation.loop_memory import (
    LoopMemory,
    LoopRules,
    LoopSetting,
    Pause,
    remembered,
)
from entities.orchestrator.automation.remedies import (
    Remedy,
    is_so,
    kept_weights,
    migrations,
    remedies_for,
    renewals,
    weights_for,
)
from entities.orchestrator.automation.situation import FreeSlot, JobSituation
from schemas.actions import SetAlgorithm, SetWeights, SetWindow

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

    What the loop has set is suggested again before it lapses, also while nothing else may be changed.

    Args:
        situation: the job's.
        memory: what the call before returned.
        now: seconds by any steady clock.
        rules: thresholds and pauses.
    """
    memory = remembered(situation, memory, now, rules)
    settings = {key: each for key, each in memory.settings.items() if is_so(situation, each.action)}
    memory = replace(memory, settings=settings)
    kept = [remedy for remedy in renewals(memory, now, rules) if not _paused(memory, remedy, now)]
    ends_soon = situation.steps_left * situation.step_ms < 1e3 * rules.least_left_s
    if situation.busy or ends_soon or situation.measured_steps < rules.least_steps:
        weights = kept_weights(situation, memory, rules)
        kept += [remedy for remedy in weights if not _paused(memory, remedy, now)]
        return tuple(kept), _all_suggested(replace(memory, since={}), kept, now, rules)
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
    routes = [remedy for remedy in weights_for(situation, memory, rules) if not _paused(memory, remedy, now)]
    chosen = (*best, *routes, *kept)
    return chosen, _all_suggested(memory, chosen, now, rules)


def adopted(memory: LoopMemory, remedy: Remedy, now: float, rules: LoopRules = LoopRules()) -> LoopMemory:
    """A suggestion was adopted: if it comes up again later that is news."""
    pauses = {
        key: replace(pause, next_s=rules.retry_s) if key == remedy.key else pause
        for key, pause in memory.pauses.items()
    }
    return renewed(replace(memory, since={}, pauses=pauses), remedy, now)


def renewed(memory: LoopMemory, remedy: Remedy, now: float) -> LoopMemory:
    """Notes until when an algorithm or a window holds that was adopted, or suggested again."""
    action = remedy.action
    if not isinstance(action, SetAlgorithm | SetWindow):
        return memory
    setting = LoopSetting(action=action, until=now + remedy.valid_s)
    return replace(memory, settings={**memory.settings, remedy.key: setting})


def _paused(memory: LoopMemory, remedy: Remedy, now: float) -> bool:
    pause = memory.pauses.get(remedy.key)
    return pause is not None and now < pause.until


def _all_suggested(
    memory: LoopMemory, remedies: Iterable[Remedy], now: float, rules: LoopRules
) -> LoopMemory:
    for remedy in remedies:
        memory = _suggested(memory, remedy, now, rules)
    return memory


def _suggested(memory: LoopMemory, remedy: Remedy, now: float, rules: LoopRules) -> LoopMemory:
    if remedy.renews:
        pause = Pause(until=now + rules.weights_renew_s, next_s=rules.retry_s)
    elif isinstance(remedy.action, SetWeights):  # repeated before it lapses
        pause = Pause(until=now + rules.weights_renew_s, next_s=rules.weights_renew_s)
        memory = replace(memory, routed={**memory.routed, remedy.action.stage: remedy.action.weights})
    else:
        before = memory.pauses.get(remedy.key)
        pause_s = rules.retry_s if before is None else before.next_s
        pause = Pause(until=now + pause_s, next_s=min(2 * pause_s, rules.retry_most_s))
    return replace(memory, pauses={**memory.pauses, remedy.key: pause})
