"""What functional modules suggest, what becomes of it, and what it was worth."""

from __future__ import annotations

from typing import Any

from schemas.changes import Forecast, JobChange
from schemas.fault_choices import FaultAction, FaultAnswer, FaultChoice, FaultCosts, FaultQuestion
from schemas.policy import Action, PolicyDecision, PolicyScore, PolicySuggestion


def suggestion(action: Action, **more: Any) -> PolicySuggestion:
    """Module m, version 1, wants this of job j, with confidence 0.8."""
    fields = {
        "module": "m",
        "version": "1",
        "job": "j",
        "confidence": 0.8,
        "reason": "why",
        "input_revision": 1,
        "valid_s": 60.0,
    }
    return PolicySuggestion(action=action, **(fields | more))


def decision(on: str = "s1", *, adopted: bool = False, **more: Any) -> PolicyDecision:
    """The orchestrator's answer to a suggestion of module m."""
    fields = {"module": "m", "version": "1", "job": "j", "reason": "r"}
    return PolicyDecision(suggestion=on, adopted=adopted, **(fields | more))


def score(version: str, value: float | None, number: int, **more: Any) -> PolicyScore:
    """What a suggestion of module m was worth."""
    fields = {
        "module": "m",
        "job": "j",
        "suggestion": f"{version}-{number}",
        "action": "set_weights",
        "at": 100.0,
        "step": 1,
        "shadow": False,
        "confidence": 0.9,
        "adopted": False,
        "right": None,
        "reason": "r",
    }
    return PolicyScore(version=version, score=value, **(fields | more))


def forecast(**more: Any) -> Forecast:
    """Of a move that is worth it."""
    return Forecast(
        **{"step_before_s": 1.0, "step_after_s": 0.8, "cost_s": 1.0, "gain_s": 10.0, "steps_left": 50} | more
    )


def stage_move(**more: Any) -> JobChange:
    """A replica of stage 0 goes to stage 1."""
    fields = {"sid": "j-s0-r1", "newcomer": "j-s1-r1", "from_stage": 0, "to_stage": 1, "step": 3, "by": "m"}
    return JobChange(**(fields | more))


def fault_question(**more: Any) -> FaultQuestion:
    """An instance of job j, one of two of its stage, does not answer its neighbour."""
    fields = {
        "id": "q1",
        "job": "j",
        "at": 100.0,
        "sid": "j-s0-r1",
        "incarnation": "i1",
        "stage": 0,
        "cluster": "a",
        "node": "n",
        "agent": "a-n",
        "kind": "unreachable",
        "verdict": "structural",
        "scope": "instance",
        "evidence": "process running, but not reachable",
        "lost": False,
        "usual": "replace",
        "spares": 1,
        "replicas": 1,
        "past": 0,
        "past_of_node": 0,
        "step": 3,
        "costs": FaultCosts(replace_s=4.0),
        "most_wait_s": 4.0,
        "answer_ms": 50.0,
    }
    return FaultQuestion(**(fields | more))


def fault_answer(action: FaultAction | None, module: str = "m", **more: Any) -> FaultAnswer:
    """What a module says about that fault, with confidence 0.8."""
    fields = {"version": "1", "job": "j", "question": "q1", "confidence": 0.8, "reason": "why"}
    return FaultAnswer(module=module, action=action, **(fields | more))


def fault_choice(**more: Any) -> FaultChoice:
    """Module m has that instance waited for."""
    fields = {
        "question": "q1",
        "sid": "j-s0-r1",
        "incarnation": "i1",
        "stage": 0,
        "node": "n",
        "step": 3,
        "at": 100.0,
        "kind": "unreachable",
        "evidence": "not reachable",
        "usual": "replace",
        "way": "wait",
        "by": "m",
        "reason": "why",
        "confidence": 0.8,
        "costs": FaultCosts(wait_s=1.0, replace_s=4.0),
        "limit_s": 3.0,
    }
    return FaultChoice(**(fields | more))
