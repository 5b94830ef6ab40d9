"""Answers under chaos: what counts as lost or doubled, what a fault cost, and what is said of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from dmsc.chaos.plan import FaultKind
from dmsc.chaos.report import InjectedFault
from dmsc.chaos.services.load import AnswerVerdict, LoadAnswer, judge, requests_of
from dmsc.chaos.services.service_report import ServiceChaosReport, svg


def answer(request: int = 0, began: float = 0.0, *, every_s: float = 0.1, **more: object) -> LoadAnswer:
    """Five pieces, one after another."""
    arrivals = tuple(began + every_s * (number + 1) for number in range(5))
    fields: dict[str, object] = {
        "request": request,
        "began": began,
        "ended": arrivals[-1],
        "arrivals": arrivals,
        "text": "whole",
        "finish": "length",
    }
    return LoadAnswer(**(fields | more))


def fault(number: int, at: float, kind: FaultKind = FaultKind.INSTANCE, **more: object) -> InjectedFault:
    return InjectedFault(number=number, kind=kind, at=at, victim="j-s0-r0", **more)


def report(answers: list[LoadAnswer], faults: list[InjectedFault]) -> ServiceChaosReport:
    return ServiceChaosReport(
        service="chat",
        version="v1",
        job="j",
        exact=True,
        seed=1,
        every="2s",
        clients=2,
        faults=tuple(faults),
        references=(answer(0), answer(1)),
        answers=tuple(answers),
    )


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, AnswerVerdict.EQUAL),
        ({"text": "whol"}, AnswerVerdict.SHORT),
        ({"finish": ""}, AnswerVerdict.SHORT),
        ({"text": "wholele"}, AnswerVerdict.LONG),
        ({"text": "whale"}, AnswerVerdict.OTHER),
        ({"finish": "stop"}, AnswerVerdict.OTHER),
        ({"error": "unavailable: nobody"}, AnswerVerdict.FAILED),
        ({"finish": "stop", "digests": ("a", "b")}, AnswerVerdict.OTHER),
        ({"digests": ("a", "c")}, AnswerVerdict.OTHER),
        ({"digests": ("a", "")}, AnswerVerdict.EQUAL),  # a server died with it
        ({"digests": ("", "c")}, AnswerVerdict.OTHER),  # … which hides no other one
        ({"digests": ("a",)}, AnswerVerdict.SHORT),  # a token without text was lost
        ({"digests": ()}, AnswerVerdict.SHORT),
        ({"digests": ("a", "b", "b")}, AnswerVerdict.LONG),
    ],
)
def test_what_an_answer_is_beside_the_undisturbed_one(
    changes: dict[str, object], verdict: AnswerVerdict
) -> None:
    assert judge(answer(**{"digests": ("a", "b")} | changes), answer(digests=("a", "b"))) is verdict


def test_requests_fit_into_the_context_and_are_the_same_for_a_seed() -> None:
    found = requests_of(9, 64, 32, 5)
    assert found == requests_of(9, 64, 32, 5)
    assert all(len(each.prompt) + each.tokens < 32 for each in found)
    assert {each.temperature for each in found} == {0.0, 1.0}
    assert {each.tokens for each in requests_of(4, 64, 0, 5)} == {64}


def test_a_fault_costs_what_the_answer_waited_that_waited_longest() -> None:
    late = answer(1, 10.0, arrivals=(10.1, 10.2, 12.2, 12.3, 12.4), ended=12.4)
    faults = [fault(0, 10.25), fault(1, 12.35), fault(2, 30.0), fault(3, 31.0, missed="nobody to hit")]
    found = report([answer(0, 10.0), late], faults)
    first, second = found.waits()
    assert (first.fault, first.answers, round(first.wait_s, 3)) == (0, 2, 2.0)
    assert (second.fault, second.answers, round(second.wait_s, 3)) == (1, 1, 0.1)
    assert found.problems() == []
    table = {name: value for name, value, _ in found.rows()}
    assert (table["faults"], table["answers"], table["lost"], table["doubled"]) == ("3", "2", "0", "0")
    assert found.closing(40)[-1] == "✓ nothing lost, nothing doubled"
    document = json.loads(json.dumps(found.as_dict()))
    assert (document["equal"], document["lost"], document["waits"]["count"]) == (2, 0, 2)
    assert document["goodput"] == pytest.approx((10 / 2.4) / (10 / 0.5))
    assert ElementTree.fromstring(svg(found)).tag.endswith("svg")


def test_each_broken_promise_is_a_problem() -> None:
    wrong = [answer(0, 10.0, text="wh"), answer(1, 10.0, error="unavailable: nobody")]
    found = report(wrong, [fault(0, 10.1, failed=True, missed="it lives")])
    assert [line.partition(":")[0] for line in found.problems()] == [
        "request 0 lost",
        "request 1 failed",
        "fault 0 did not fire",
        "no fault fired",
    ]
    assert "ask for more" in report([answer(0, 50.0)], [fault(0, 10.1)]).problems()[0]
    many = report([answer(0, 10.0, text="wh") for _ in range(9)], [fault(0, 10.1)])
    assert many.problems()[-1] == "4 more answers are not as undisturbed"


def test_a_version_that_is_not_exact_is_named_where_answers_differ() -> None:
    inexact = replace(
        report([answer(0, 10.0, text="whale")], [fault(0, 10.1)]), exact=False, inexact_because="width 510"
    )
    different, why = inexact.problems()
    assert different == "request 0 different: 'whale' beside 'whole'"
    assert why.startswith("chat@v1 is not exact (width 510): its answers depend on who computes them")
    lost = replace(inexact, answers=(answer(0, 10.0, text="who"),))
    assert len(lost.problems()) == 1, "arithmetic loses nothing"


def test_it_is_said_where_answers_of_the_same_text_differ() -> None:
    references = (answer(0, digests=("a", "b")), answer(1))
    other = answer(0, 10.0, digests=("a", "c"))
    found = replace(report([other], [fault(0, 10.1)]), references=references)
    assert found.problems() == ["request 0 different: the text is the same, the logits of token 1 are others"]
    longer = replace(found, answers=(answer(0, 10.0, digests=("a", "b", "b")),))
    assert longer.problems() == ["request 0 doubled: 3 tokens beside 2, though the text is the same"]
    ends = replace(found, answers=(answer(0, 10.0, digests=("a", "b"), finish="stop"),))
    assert ends.problems() == ["request 0 different: it ends by stop beside length"]
