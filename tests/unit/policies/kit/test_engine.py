"""The engine around a policy: when it is asked, what it may return, and that its errors stay in it."""

from __future__ import annotations

import pytest

from bus import subjects
from policies.kit.engine import Engine, EngineConfig, Event, Result
from policies.kit.inference import Inferred
from policies.kit.policy import EVENTS, Policy
from schemas.errors import BadInput
from schemas.fault_choices import Replace
from schemas.observation import Observation
from schemas.step import Member
from schemas.store import StoreRows
from tests.builders.policies import fault_question
from tests.builders.telemetry import sample


def event(at: float = 0.0, **more) -> Event:
    return Event(row=subjects.INSTANCE_SAMPLE, message=sample(**more), id=f"e{at}", at=at)


class Eager(Policy):
    name = "eager"
    every_s = 1.0

    def decide(self, view, now):
        return self.set_weights(view, 0, dict.fromkeys(view.instances, 1.0), reason="as ever")


def test_a_policy_is_asked_when_something_new_was_seen_and_it_is_time():
    engine = Engine(Eager(), EngineConfig())
    assert engine.due(0.0) is None
    engine.take([event(0.0)])
    assert engine.due(0.0) == 0.0
    [suggestion] = engine.decide(0.0).suggestions
    assert (suggestion.module, suggestion.version, suggestion.job, suggestion.input_revision) == (
        "eager",
        "1",
        "j",
        1,
    )
    assert engine.due(0.5) is None
    engine.take([event(0.5)])
    assert engine.due(0.6) == pytest.approx(0.4)
    assert engine.decide(0.6).suggestions == []
    assert len(engine.decide(1.0).suggestions) == 1


def test_a_clock_that_is_put_back_holds_nothing_up():
    engine = Engine(Eager(), EngineConfig())
    engine.take([event(5_000.0)])
    assert len(engine.decide(5_000.0).suggestions) == 1
    engine.take([event(1_400.0)])
    assert engine.due(1_400.0) == 0.0
    assert len(engine.decide(1_400.0).suggestions) == 1
    engine.take([event(1_400.5)])
    assert engine.due(1_400.5) == pytest.approx(0.5)


def test_what_may_lead_to_a_decision_at_once_is_urgent():
    engine = Engine(Eager(), EngineConfig())
    assert engine.is_urgent(event(0.0), 0.0), "nobody was asked about its job yet"
    engine.take([event(0.0)])
    engine.decide(0.0)
    assert not engine.is_urgent(event(0.5), 0.5)
    assert engine.is_urgent(event(1.0), 1.0)
    of_none = Event(row=subjects.OBSERVATION, message=Observation(source="s", what="w"), id="o", at=1.0)
    assert not engine.is_urgent(of_none, 1.0)
    inferred = Inferred(job="j", key="k", value=1, took_s=0.1)
    assert engine.is_urgent(Result(inferred=inferred, id="r", at=0.5), 0.5)


def test_the_same_events_give_the_same_suggestions():
    def run():
        engine = Engine(Eager(), EngineConfig())
        found = []
        for at in range(5):
            engine.take([event(float(at), step=at, service_ms=1.0 + at)])
            found += engine.decide(float(at)).suggestions
        return found

    assert run() == run()
    assert len(run()) == 5


def test_an_error_is_told_once_counted_and_survived():
    class Moody(Policy):
        name = "moody"
        calls = 0

        def decide(self, view, now):
            Moody.calls += 1
            if Moody.calls % 2:
                raise ValueError("bad mood")
            return self.note(view, "fine")

    engine = Engine(Moody(), EngineConfig(max_errors=2))
    problems, suggestions = [], []
    for at in range(8):
        engine.take([event(2.0 * at)])
        output = engine.decide(2.0 * at)
        problems += output.problems
        suggestions += output.suggestions
    assert engine.counters.errors == 4
    assert len(suggestions) == 4
    assert [problem.where for problem in problems] == ["decide"]
    assert "ValueError: bad mood (test_engine.py:" in problems[0].text
    assert not engine.suspended  # never two in a row


def test_errors_in_a_row_suspend_it_with_the_reason():
    class Broken(Policy):
        name = "broken"

        def on_instance_sample(self, message, at):
            raise KeyError("nope")

    engine = Engine(Broken(), EngineConfig(max_errors=3))
    engine.take([event(float(at)) for at in range(10)])
    assert engine.counters.errors == 3
    assert (
        engine.suspended
        == "suspended after 3 errors in a row, the last in on_instance_sample: KeyError: 'nope'"
    )
    assert engine.due(99.0) is None
    assert engine.decide(99.0).suggestions == []


@pytest.mark.parametrize("returned", [42, "text", [1], {"a": 1}])
def test_what_is_not_a_suggestion_is_an_error_of_the_policy(returned):
    class Odd(Policy):
        name = "odd"

        def decide(self, view, now):
            return returned

    engine = Engine(Odd(), EngineConfig())
    engine.take([event()])
    output = engine.decide(0.0)
    assert output.suggestions == []
    assert "decide returned" in output.problems[0].text


def test_a_flood_is_held_back():
    class Flood(Policy):
        name = "flood"

        def decide(self, view, now):
            return [self.note(view, str(index)) for index in range(100)]

    engine = Engine(Flood(), EngineConfig(max_per_s=2.0, burst=5))
    found = []
    for at in range(10):
        engine.take([event(float(at))])
        found += engine.decide(float(at)).suggestions
    assert len(found) == 5 + 9 * 2
    assert engine.counters.held_back == 1000 - len(found)


def test_it_subscribes_to_what_it_handles_and_what_the_view_needs():
    class Claims(Policy):
        name = "claims"

        def on_step_claim(self, message, at): ...

    rows = Engine(Claims(), EngineConfig()).rows()
    assert subjects.STEP_CLAIM in rows
    assert subjects.INSTANCE_SAMPLE in rows
    assert len(rows) == len(set(rows))
    assert subjects.NODE_SAMPLE not in rows
    assert "step_claim" in EVENTS


def test_mistakes_in_the_class_are_named_when_it_is_defined():
    with pytest.raises(TypeError, match="no such event; there are: advertisement"):
        type("Typo", (Policy,), {"name": "typo", "on_smaple": lambda self, message, at: None})
    with pytest.raises(TypeError, match="use letters, digits"):
        type("Dots", (Policy,), {"name": "a.b"})
    with pytest.raises(BadInput, match="has no name"):
        Engine(type("Nameless", (Policy,), {})(), EngineConfig())


def test_what_a_policy_wants_to_read_comes_out_and_the_answer_goes_in():
    class Reader(Policy):
        name = "reader"

        def __init__(self):
            self.seen = []

        def decide(self, view, now):
            return None

        def reads(self, view, now):
            return [
                self.read(view, sid, "events", where={"kind": "refusal"}, limit=5) for sid in view.instances
            ]

        def on_store_rows(self, rows, at):
            self.seen.append((rows.records(), at))

    engine = Engine(Reader(), EngineConfig())
    engine.take([event(0.0)])
    [read] = engine.decide(0.0).reads
    assert read.sid in engine.observations.jobs["j"].instances
    assert (read.query.job, read.query.table, read.query.newest, read.query.limit) == ("j", "events", True, 5)
    rows = StoreRows(
        member=Member(sid=read.sid, incarnation="i"),
        table="events",
        columns=("text",),
        rows=(("no",),),
        schema_version=1,
    )
    engine.take([Event(row=subjects.STORE_QUERY, message=rows, id="s", at=3.0)])
    assert engine.policy.seen == [([{"text": "no"}], 3.0)]


def test_reads_that_are_none_are_told_and_contained():
    class Confused(Eager):
        name = "confused"

        def reads(self, view, now):
            return "everything"

    engine = Engine(Confused(), EngineConfig())
    engine.take([event(0.0)])
    output = engine.decide(0.0)
    assert len(output.suggestions) == 1
    assert output.reads == []
    assert "return a list of what self.read(…) makes" in output.problems[0].text


class Firm(Policy):
    """Has something to say about faults of stage 0 only."""

    name = "firm"

    def decide(self, view, now):
        return None

    def on_fault(self, fault, view):
        if fault.stage:
            return {1: "wait", 2: self.retry(fault.model_copy(update={"id": "another"}), reason="r")}[
                fault.stage
            ]
        return self.replace(fault, avoid=["b", "a"], reason=f"{len(view.faults)} before")


def test_a_policy_is_asked_about_a_fault_and_sees_those_before():
    engine, problems = Engine(Firm(), EngineConfig()), []
    assert subjects.FAULT_QUESTION in engine.rows()
    assert subjects.FAULT_QUESTION not in Engine(Eager(), EngineConfig()).rows()
    answers = [engine.fault(fault_question(id=id), 1.0, into=problems) for id in ("q1", "q2")]
    assert [answer.reason for answer in answers] == ["0 before", "1 before"]
    assert (answers[0].question, answers[0].action) == ("q1", Replace(avoid=("a", "b")))
    engine.disable("j")
    assert engine.fault(fault_question(id="q3"), 1.0, into=problems) is None
    assert problems == []


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_no_answer_to_this_fault_is_contained(stage: int):
    engine, problems = Engine(Firm(), EngineConfig(max_errors=2)), []
    for _ in range(3):
        assert engine.fault(fault_question(stage=stage), 1.0, into=problems) is None
    [problem] = problems
    assert problem.where == "on_fault"
    assert "return None, or what self.retry(fault, …)" in problem.text
    assert engine.counters.errors == 2
    assert engine.suspended.startswith("suspended after 2 errors in a row, the last in on_fault")


def test_a_question_is_no_event():
    with pytest.raises(TypeError, match="on_fault_question: no such event"):
        type("Curious", (Eager,), {"name": "curious", "on_fault_question": lambda self, fault, at: None})
