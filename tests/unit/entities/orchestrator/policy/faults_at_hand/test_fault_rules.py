"""Whose way is gone about a fault at hand, how it is bounded, and what the others are told (ADR-0099)."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.faults_at_hand.fault_rules import JudgedAnswer, ReceivedAnswer, rule
from entities.orchestrator.policy.module_reputation import ModuleReputation
from schemas.automation import Automation
from schemas.fault_choices import FaultAnswer, FaultCosts, FaultQuestion, FaultRuling, Replace, Retry, Wait
from schemas.policy import ModuleState
from tests.builders.policies import fault_answer, fault_question

SAID = fault_question()
WORKS = {"usual": "wait", "verdict": "transient", "kind": "slow"}


def ruled(
    *answers: FaultAnswer,
    question: FaultQuestion = SAID,
    shadows: tuple[str, ...] = (),
    precedence: dict[str, int] | None = None,
    **more: Any,
) -> tuple[FaultRuling, dict[str, JudgedAnswer]]:
    received = [
        ReceivedAnswer(
            answer=answer,
            id=f"of {answer.module}",
            standing=ModuleReputation(
                state=ModuleState.SHADOW if answer.module in shadows else ModuleState.ACTIVE
            ),
        )
        for answer in answers
    ]
    given = {"automation": Automation.ACT, "agents": ("a-n", "a-o"), "distrusted": {}}
    config = ArbitrationConfig(precedence=precedence or {})
    ruling, judged = rule(question, received, config=config, **given | more)
    assert all(one.reason for one in judged)
    return ruling, {one.received.answer.module: one for one in judged}


def test_nobody_says_anything_and_the_orchestrator_does_as_usual():
    ruling, judged = ruled(fault_answer(None))
    assert (ruling.way, ruling.by, judged) == ("replace", "orchestrator", {})


def test_the_highest_rank_prevails_and_the_others_are_told_so():
    answers = (fault_answer(Retry(), "first", confidence=0.7), fault_answer(Wait(for_s=2.0), "second"))
    ruling, judged = ruled(*answers)
    assert (ruling.way, ruling.by) == ("wait", "second")
    assert judged["second"].adopted
    assert judged["first"].reason == "second prevails with confidence 0.80 against 0.70"
    ruling, _ = ruled(*answers, precedence={"first": 1})
    assert ruling.by == "first"


def test_the_order_in_which_answers_come_changes_nothing():
    answers = [fault_answer(Retry(), name) for name in ("a", "b", "c")]
    said = ruled(*answers)[0].model_dump_json()
    assert said == ruled(*reversed(answers))[0].model_dump_json()


@pytest.mark.parametrize(
    ("asked_s", "own", "granted_s"),
    [(2.0, None, 2.0), (1e6, None, 4.0), (3.0, 2.5, 2.5)],
    ids=["as asked", "the loss costs no more", "by its own forecast"],
)
def test_a_wait_never_lasts_longer_than_the_loss_costs(asked_s: float, own: float | None, granted_s: float):
    ruling, _ = ruled(fault_answer(Wait(for_s=asked_s), costs=FaultCosts(replace_s=own)))
    assert ruling.action == Wait(for_s=granted_s)


def test_forecasts_of_the_module_go_before_those_of_the_job():
    ruling, _ = ruled(fault_answer(Retry(), costs=FaultCosts(retry_s=0.5)))
    assert ruling.costs == FaultCosts(retry_s=0.5, replace_s=4.0)


@pytest.mark.parametrize(
    ("answer", "question", "why"),
    [
        (fault_answer(Retry(), confidence=0.4), {}, "confidence 0.40 is below 0.50"),
        (fault_answer(Replace(prefer="a-x")), {}, "no node a-x is registered"),
        (fault_answer(Replace(prefer="a-o", avoid=("a-o",))), {}, "both preferred and avoided"),
        (fault_answer(Replace()), {**WORKS, "replicas": 0}, "nobody else of its stage does"),
        (
            fault_answer(Wait(for_s=1.0), costs=FaultCosts(wait_s=9.0)),
            {},
            "by its own forecast wait costs 9.0 s, and replace 4.0 s",
        ),
    ],
)
def test_what_is_not_considered_is_one_line(answer: FaultAnswer, question: dict[str, Any], why: str):
    ruling, judged = ruled(answer, question=SAID.model_copy(update=question))
    assert ruling.by == "orchestrator"
    assert why in judged["m"].reason


def test_shadows_and_advice_hear_what_would_have_been():
    ruling, judged = ruled(fault_answer(Retry()), shadows=("m",))
    assert ruling.by == "orchestrator"
    assert judged["m"].reason.startswith("in shadow, would have been considered: retry")
    ruling, judged = ruled(fault_answer(Retry()), automation=Automation.ADVISE)
    assert ruling.by == "orchestrator"
    assert judged["m"].reason.startswith("advice, ")


def test_a_module_that_waited_in_vain_may_still_say_where_the_replacement_goes():
    distrusted = {"m": "its last 3 waits were no better"}
    ruling, judged = ruled(fault_answer(Wait(for_s=1.0)), distrusted=distrusted)
    assert (ruling.by, judged["m"].reason) == ("orchestrator", distrusted["m"])
    ruling, _ = ruled(fault_answer(Replace(prefer="a-o")), distrusted=distrusted)
    assert ruling.action == Replace(prefer="a-o")


def test_a_working_instance_that_may_not_be_given_up_now_is_not_and_its_module_is_told():
    question = fault_question(**WORKS, may_replace=False)
    ruling, judged = ruled(fault_answer(Replace()), question=question)
    assert (ruling.way, judged["m"].adopted) == ("wait", False)
    assert "another was given up just now, or somebody is still on the way" in judged["m"].reason
