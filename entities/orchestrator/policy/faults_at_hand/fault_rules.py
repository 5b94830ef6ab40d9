"""Which way is gone about a fault at hand: the answers of modules are ranked like suggestions. Pure.

A way is checked as a suggestion is: the module and the job, sense, worth; the highest rank that is left wins
(`knobs.rank`). Nobody left: the orchestrator goes its usual way. What a module wins is bounded here: a wait
ends when the loss would have cost as much, and a healthy instance is not given up where nobody else of its
stage works.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.knobs import rank
from entities.orchestrator.policy.module_reputation import ModuleReputation
from schemas.automation import Automation
from schemas.fault_choices import FaultAction, FaultAnswer, FaultQuestion, FaultRuling, Replace, Wait
from schemas.policy import ModuleState


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedAnswer:
    """An answer that came in time. `id`: its envelope's; `standing`: its module's, as it is promoted."""

    answer: FaultAnswer
    id: str
    standing: ModuleReputation


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedAnswer:
    """What became of an answer, with the reason."""

    received: ReceivedAnswer
    adopted: bool
    reason: str
    nonsense: bool = False


def rule(
    question: FaultQuestion,
    received: Sequence[ReceivedAnswer],
    *,
    automation: Automation,
    agents: Collection[str],
    distrusted: Mapping[str, str],
    config: ArbitrationConfig,
) -> tuple[FaultRuling, list[JudgedAnswer]]:
    """Chooses among the answers.

    Args:
        question: the fault.
        received: the answers, each of another module version.
        automation: how far the job is changed without a person.
        agents: SIDs of the registered nodes' agents.
        distrusted: modules that have waited in vain too often, with the reason.
        config: the limits of arbitration.

    Returns:
        The way that is gone, and what became of each answer.
    """
    judged: list[JudgedAnswer] = []
    candidates: list[ReceivedAnswer] = []
    for one in received:
        answer = one.answer
        if answer.action is None:
            continue
        if nonsense := _nonsense(question, answer.action, agents):
            judged.append(JudgedAnswer(received=one, adopted=False, reason=nonsense, nonsense=True))
        elif objection := _objection(question, answer, distrusted, config):
            judged.append(JudgedAnswer(received=one, adopted=False, reason=objection))
        elif one.standing.state is ModuleState.SHADOW or automation is not Automation.ACT:
            held_back = "in shadow" if one.standing.state is ModuleState.SHADOW else "advice"
            text = f"{held_back}, would have been considered: {answer.action.action}; {answer.reason}"
            judged.append(JudgedAnswer(received=one, adopted=False, reason=text))
        else:
            candidates.append(one)
    asked = len(received)
    if not candidates:
        return FaultRuling.as_usual(question, "nobody says otherwise", asked=asked), judged

    def order(one: ReceivedAnswer) -> tuple[tuple[int, int, float], str]:
        return rank(one.answer.module, one.answer.confidence, config.precedence), one.answer.module

    winner = max(candidates, key=order)
    for one in candidates:
        if one is not winner:
            figures = f"confidence {winner.answer.confidence:.2f} against {one.answer.confidence:.2f}"
            text = f"{winner.answer.module} prevails with {figures}"
            judged.append(JudgedAnswer(received=one, adopted=False, reason=text))
    answer = winner.answer
    assert answer.action is not None
    action, costs = bounded(question, answer), answer.costs.over(question.costs)
    limit = f" for at most {action.for_s:.1f} s" if isinstance(action, Wait) else ""
    judged.append(
        JudgedAnswer(
            received=winner, adopted=True, reason=f"adopted: {action.action}{limit}; {answer.reason}"
        )
    )
    ruling = FaultRuling(
        question=question.id,
        action=action,
        by=answer.module,
        reason=answer.reason,
        confidence=answer.confidence,
        costs=costs,
        asked=asked,
    )
    return ruling, judged


def bounded(question: FaultQuestion, answer: FaultAnswer) -> FaultAction:
    """The action of an answer; a wait never longer than the loss costs by either forecast."""
    assert answer.action is not None
    if not isinstance(answer.action, Wait):
        return answer.action
    limits = [answer.action.for_s, question.most_wait_s]
    if answer.costs.replace_s is not None:
        limits.append(answer.costs.replace_s)
    return Wait(for_s=max(min(limits), 1e-3))


def _nonsense(question: FaultQuestion, action: FaultAction, agents: Collection[str]) -> str:
    """Why nobody could mean this; empty if one could."""
    if not isinstance(action, Replace) or action.prefer is None:
        return ""
    if action.prefer in action.avoid:
        return f"node {action.prefer} is to be both preferred and avoided"
    if action.prefer not in agents:
        return f"no node {action.prefer} is registered (name its agent's SID)"
    return ""


def _objection(
    question: FaultQuestion, answer: FaultAnswer, distrusted: Mapping[str, str], config: ArbitrationConfig
) -> str:
    """Why a sensible answer is not considered; empty if it is."""
    action = answer.action
    assert action is not None
    if answer.confidence < config.min_confidence:
        return f"confidence {answer.confidence:.2f} is below {config.min_confidence:.2f}"
    if question.usual == "replace":
        why = distrusted.get(answer.module, "") if action.action in ("retry", "wait") else ""
    else:
        alone = action.action == "replace" and question.replicas < 1
        why = f"{question.sid} works, and nobody else of its stage does" if alone else ""
        if action.action == "replace" and not question.may_replace and not alone:
            why = f"{question.sid} works: another was given up just now, or somebody is still on the way"
    if why:
        return why
    costs = answer.costs.over(question.costs)
    own, usual = costs.of(action.action), costs.of(question.usual)
    if own is not None and usual is not None and own > usual:
        return f"by its own forecast {action.action} costs {own:.1f} s, and {question.usual} {usual:.1f} s"
    return ""
