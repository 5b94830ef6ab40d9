"""A replay asks the policy when a live module would have, with the record's time, and always the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bus import subjects
from policies.kit.engine import Event
from policies.kit.inference import Inference, Inferred
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.scoring.replay import PolicyReplay
from schemas.fault_choices import FaultAnswer, FaultQuestion
from schemas.policy import PolicyDecision, PolicySuggestion
from tests.builders.policies import decision, fault_question
from tests.builders.telemetry import sample

SIDS = ("j-s0-r0", "j-s0-r1")
EPOCH = 1_790_000_000.0


class Asked(Policy):
    """Notes when it was asked, and suggests each time."""

    name = "asked"
    every_s = 2.0

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.declined: list[bool] = []

    def decide(self, view: JobView, now: float) -> Suggestions:
        self.asked.append(now - EPOCH)
        own = view.own.get("stage 0")
        self.declined.append(own is not None and own.declined)
        return self.set_weights(view, 0, dict.fromkeys(view.instances, 1.0), reason="because")


def events(*at: float) -> list[Event]:
    return [
        Event(
            row=subjects.INSTANCE_SAMPLE,
            message=sample(SIDS[index % 2], step=index),
            id=f"e{index}",
            at=EPOCH + moment,
        )
        for index, moment in enumerate(at)
    ]


def test_asked_at_each_event_but_not_more_often_than_it_wants() -> None:
    policy = Asked()
    PolicyReplay(policy).run(events(0.0, 0.5, 1.0, 1.5, 2.5, 7.0))
    # At 2.0 it is due for what it saw at 1.5, and at 4.5 for what it saw at 2.5.
    assert [round(at, 6) for at in policy.asked] == [0.0, 2.0, 4.0, 7.0]


def test_suggestions_carry_the_records_time_and_no_clock() -> None:
    first, again = PolicyReplay(Asked()), PolicyReplay(Asked())
    said = first.run(events(0.0, 3.0, 6.0))
    assert [one.at - EPOCH for one in said] == [0.0, 3.0, 6.0]
    assert [one.id for one in said] == ["replay-1", "replay-2", "replay-3"]
    assert [one.suggestion.input_revision for one in said] == [0, 1, 2]
    assert said == again.run(events(0.0, 3.0, 6.0))


def test_an_answer_reaches_the_policy() -> None:
    def refuse(suggestion: PolicySuggestion, id: str, now: float, view: JobView) -> PolicyDecision:
        return decision(id, module=suggestion.module, reason="no")

    policy = Asked()
    said = PolicyReplay(policy, answer=refuse).run(events(0.0, 3.0))
    assert policy.declined == [False, True]
    assert [one.decision is not None and one.decision.reason for one in said] == ["no", "no"]


def test_what_it_said_before_a_fault_was_at_hand_is_returned_with_it() -> None:
    class Firm(Asked):
        name = "firm"

        def on_fault(self, fault: FaultQuestion, view: JobView) -> FaultAnswer:
            return self.replace(fault, reason="because")

    replay = PolicyReplay(Firm())
    for event in events(0.0, 1.0):
        replay.feed(event)
    question = fault_question(answer_ms=50.0)
    said = replay.feed(Event(row=subjects.FAULT_QUESTION, message=question, id="q", at=EPOCH + 3.0))
    assert [one.at - EPOCH for one in said] == [2.0]
    assert len(replay.answers) == 1


def test_messages_that_the_policy_does_not_take_do_not_wake_it() -> None:
    policy = Asked()
    replay = PolicyReplay(policy)
    assert subjects.NOTICE not in replay.rows
    replay.feed(Event(row=subjects.NOTICE, message=sample(), id="n", at=EPOCH))
    assert policy.asked == []


def test_time_never_goes_back() -> None:
    policy = Asked()
    PolicyReplay(policy).run(events(5.0, 1.0, 8.0))
    assert policy.asked == sorted(policy.asked)


def test_a_policy_that_raises_is_contained_and_told_once() -> None:
    class Wrong(Asked):
        name = "wrong"

        def decide(self, view: JobView, now: float) -> Suggestions:
            raise ValueError("nothing works")

    replay = PolicyReplay(Wrong())
    assert replay.run(events(*(3.0 * number for number in range(9)))) == []
    assert [problem.where for problem in replay.problems] == ["decide"]
    assert replay.engine.suspended


class Doubling(Asked):
    """Its model doubles a number, and fails at 4."""

    name = "doubling"

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    @classmethod
    def model(cls) -> Callable[[Any], Any]:
        def double(number: int) -> int:
            if number == 4:
                raise ValueError("not four")
            return 2 * number

        return double

    def infers(self, view: JobView, now: float) -> list[Inference]:
        return [self.infer(view, "number", view.step)]

    def on_inference(self, inferred: Inferred, at: float) -> None:
        self.answers.append((inferred.value, at - EPOCH))


def test_a_model_computes_here_and_at_once() -> None:
    policy = Doubling()
    replay = PolicyReplay(policy)
    replay.run(events(*(3.0 * number for number in range(6))))
    assert policy.answers[:3] == [(0, 0.0), (0, 2.0), (2, 4.0)], "a result is news, so it is asked again"
    assert {value for value, _ in policy.answers} == {0, 2, 4, 6}
    (problem,) = replay.problems
    assert (problem.where, problem.text) == ("model", "ValueError: not four")
