"""A suggestion is followed until it is known what it was worth; the same in a live module and in a replay."""

from __future__ import annotations

from typing import Any

import pytest

from bus import subjects
from bus.subject_row import Subject
from dmsc.replay.present import by_action
from policies.kit.engine import Event
from policies.kit.view import Observations
from policies.scoring.scoreboard import Scoreboard, ScoreboardConfig
from schemas.actions import Action, ExpectFailures, Migrate, Recut, Scale, SetAlgorithm, SetRate, SetWindow
from schemas.base import Message
from schemas.changes import ChangeState, JobObjective, StepUse
from schemas.fault_choices import FaultOutcome, Retry, Wait
from schemas.job import JobEvent, JobState
from schemas.policy import (
    AvoidInstance,
    MoveInstance,
    NoAction,
    PolicyScore,
    SetWeights,
)
from tests.builders.faults import fault_verdict
from tests.builders.jobs import state_event, step_event
from tests.builders.policies import decision, fault_answer, fault_choice, forecast, stage_move, suggestion
from tests.builders.telemetry import sample

FAST, SLOW = "j-s0-r0", "j-s0-r1"


class Course:
    """A job of one stage with two instances, watched by one version's scoreboard."""

    def __init__(self) -> None:
        self.observations = Observations()
        self.board = Scoreboard("m", "1", self.observations, ScoreboardConfig(horizon_s=10.0))
        self.at = 0.0
        self.scores: list[PolicyScore] = []

    def happens(self, message: Message, row: Subject = subjects.JOB_EVENT) -> None:
        self.board.take([Event(row=row, message=message, id=f"e{self.at}", at=self.at)])
        self.observations.take(message, self.at)

    def second(self, fast_ms: float = 10.0, slow_ms: float = 30.0, **more: Any) -> None:
        self.at += 1.0
        for sid, service_ms in ((FAST, fast_ms), (SLOW, slow_ms)):
            if service_ms:
                self.happens(sample(sid, service_ms=service_ms, **more), subjects.INSTANCE_SAMPLE)
        self.scores += self.board.settle(self.at, shadow=False)

    def says(self, action: Any, id: str = "s1", *, confidence: float = 0.9, valid_s: float = 60.0) -> None:
        said = suggestion(action, confidence=confidence, valid_s=valid_s)
        self.board.follow(said, id, self.at)

    def faults(self, sid: str, incarnation: str = "i1", verdict: Any = "transient") -> None:
        what = {"action": "replaced", "reason": "killed by signal 9"}
        told = fault_verdict(verdict, sid=sid, incarnation=incarnation, **what)
        self.happens(told, subjects.FAULT_VERDICT)


def weights(fast: float, slow: float) -> SetWeights:
    return SetWeights(stage=0, weights={FAST: fast, SLOW: slow})


def test_weights_are_judged_by_what_is_measured_afterwards() -> None:
    course = Course()
    for _ in range(3):
        course.second(10.0, 10.0)
    course.says(weights(3.0, 1.0))  # before that, nothing spoke for it
    for _ in range(9):
        course.second(10.0, 30.0)
        assert not course.scores, "not yet: it is followed for the whole horizon"
    course.second()
    (score,) = course.scores
    assert score.score is not None
    assert score.score > 0.95
    assert (score.suggestion, score.action, score.right) == ("s1", "set_weights", True)
    assert (score.at, score.confidence, score.adopted, score.shadow) == (3.0, 0.9, False, False)
    for _ in range(20):
        course.second()
    assert len(course.scores) == 1, "once"


def test_a_later_suggestion_about_the_same_ends_the_first_ones_time() -> None:
    course = Course()
    course.second()
    course.says(weights(3.0, 1.0), "s1")
    for _ in range(4):
        course.second(10.0, 30.0)
    course.says(weights(1.0, 1.0), "s2")
    for _ in range(10):
        course.second(10.0, 10.0)
    first, second = course.scores
    assert first.score is not None
    assert first.score > 0.9, "what came after it is not held against it"
    assert second.score == 0.5


def test_one_replaced_at_once_is_followed_for_a_moment() -> None:
    course = Course()
    course.second()
    course.says(weights(3.0, 1.0), "s1")
    course.says(weights(1.0, 1.0), "s2")
    course.second()
    assert not course.scores
    course.second()
    assert [(score.suggestion, score.right) for score in course.scores] == [("s1", True)]


def test_one_whose_job_is_over_at_once_is_not_scored() -> None:
    course = Course()
    course.second()
    course.says(weights(3.0, 1.0))
    course.happens(state_event(JobState.DONE))
    assert [score.score for score in course.board.settle(course.at)] == [None]


def test_the_end_of_the_job_ends_everything() -> None:
    course = Course()
    course.second()
    course.says(weights(3.0, 1.0))
    for _ in range(3):
        course.second()
    course.happens(state_event(JobState.DONE))
    (score,) = course.board.settle(course.at)
    assert score.right is True


def test_an_instance_without_work_is_as_fast_as_it_was() -> None:
    course = Course()
    for _ in range(3):
        course.second(10.0, 30.0)
    course.says(weights(1.0, 0.0))
    for _ in range(10):
        course.second(10.0, 0.0)  # it gets nothing, so nothing is measured
    (score,) = course.scores
    assert score.score is not None
    assert 0.5 < score.score < 0.9, "better than equal shares, worse than 3 to 1"


def test_the_decision_is_noted() -> None:
    course = Course()
    course.second()
    course.says(weights(3.0, 1.0))
    course.happens(decision(adopted=True), subjects.POLICY_DECISION)
    for _ in range(10):
        course.second()
    assert course.scores[0].adopted


def test_avoiding_one_that_faults_is_right_and_what_was_not_foreseen_is_missed() -> None:
    course = Course()
    course.second()
    course.faults(FAST)
    course.second()
    assert not course.scores, "nothing was claimed yet"
    course.says(AvoidInstance(sid=SLOW))
    course.second()
    course.faults(SLOW)
    course.faults(SLOW)  # repeated
    course.faults(FAST, "i2", "unfounded")
    for _ in range(10):
        course.second(10.0, 10.0)
    missed, hit = course.scores
    assert (missed.action, missed.score, missed.at) == ("missed", 0.0, 1.0)
    assert missed.reason == f"{FAST} had a fault that was not foreseen: killed by signal 9"
    assert (hit.action, hit.score) == ("avoid_instance", 1.0)


def test_avoiding_one_that_is_well_is_a_false_alarm() -> None:
    course = Course()
    course.second()
    course.says(AvoidInstance(sid=SLOW))
    for _ in range(10):
        course.second(10.0, 10.0)
    assert [(score.score, score.right) for score in course.scores] == [(0.0, False)]


def test_a_move_waits_for_its_measured_effect() -> None:
    course = Course()
    course.second()
    course.says(MoveInstance(sid=FAST, stage=1, forecast=forecast()), valid_s=5.0)

    def told(state: ChangeState, after_s: float | None = None) -> JobEvent:
        moved = stage_move(sid=FAST, state=state, before_s=1.0, after_s=after_s)
        return JobEvent(job="j", kind="change", at=course.at, change=moved)

    course.second()
    course.happens(told(ChangeState.UNDER_WAY))
    for _ in range(30):
        course.second()
    assert not course.scores, "it is under way"
    course.happens(told(ChangeState.BETTER, 0.9))
    course.second()
    assert [score.score for score in course.scores] == [0.75]


def test_observations_and_unknown_jobs_are_not_scored() -> None:
    course = Course()
    course.second()
    course.says(NoAction(note="interesting"))
    other = suggestion(weights(1.0, 2.0), job="other")
    course.board.follow(other, "s9", course.at)
    for _ in range(20):
        course.second()
    assert course.scores == []


@pytest.mark.parametrize(
    ("step_s", "low", "high"),
    [(1.0, 1.0, 1.0), (0.8, 0.5, 0.5), (0.6, 0.0, 0.1), (2.0, 1.0, 1.0)],
    ids=["as forecast without it", "as short without it", "shorter", "longer"],
)
@pytest.mark.parametrize(
    "action",
    [
        Migrate(sid=SLOW, forecast=forecast()),
        Scale(replicas=3, forecast=forecast()),
        SetWindow(stage=0, in_flight=2, forecast=forecast()),
        SetAlgorithm(algorithm="least-outstanding", forecast=forecast()),
        SetRate(per_s=4.0, forecast=forecast()),
        Recut(cuts=None, revision=None, forecast=forecast()),
    ],
    ids=lambda action: action.action,
)
def test_a_change_that_was_not_carried_out_is_scored_by_the_steps_without_it(
    action: Action, step_s: float, low: float, high: float
) -> None:
    course = Course()
    course.second()
    course.says(action)
    for step in range(10):
        course.happens(step_event(step, step_s=step_s, at=course.at))
        course.second()
    (score,) = course.scores
    assert score.score is not None
    assert low <= round(score.score, 6) <= high, score.reason
    assert (score.action, score.objective) == (action.action, "time")


def test_it_counts_what_the_objective_of_its_forecast_names_and_says_so() -> None:
    use = {JobObjective.COST: StepUse(before=4.0, after=1.0)}
    cheaper = forecast(step_before_s=1.0, step_after_s=1.2, objective=JobObjective.COST, uses=use)
    course = Course()
    course.second()
    course.says(Scale(replicas=1, forecast=cheaper))
    for step in range(10):
        course.happens(step_event(step, step_s=1.0, at=course.at))
        course.second()
    (score,) = course.scores
    assert (score.score, score.objective) == (1.0, "cost")
    assert list(by_action({("m", "1"): [score]})) == [("m", "1", "scale", "cost")]


def test_too_few_steps_give_no_score() -> None:
    course = Course()
    course.second()
    course.says(Scale(replicas=3, forecast=forecast()))
    for _ in range(10):
        course.second()
    (score,) = course.scores
    assert (score.score, score.reason) == (None, "not carried out, and 0 steps were measured: too few")


def test_expected_failures_are_compared_with_those_that_came() -> None:
    worth = []
    for failures in (0, 1, 4):
        course = Course()
        course.second()
        course.says(ExpectFailures(between_s=60.0), valid_s=120.0)
        for second in range(130):
            if second < failures:
                course.happens(JobEvent(job="j", kind="recovery", at=course.at))
            course.second()
        worth += [score.score for score in course.scores if score.action == "expect_failures"]
    none, one, many = worth
    assert none is not None
    assert none < 0.5 < one < many, "worse than expecting none soon; better; better still"


def test_an_answer_about_a_fault_is_scored_by_the_time_until_training_went_on():
    course = Course()
    for number, action in enumerate((Wait(for_s=3.0), Retry(), Wait(for_s=3.0))):
        course.board.follow_answer(fault_answer(action, question=f"q{number}"), f"a{number}", course.at)
    outcomes: list[dict[str, Any]] = [
        {"outcome": FaultOutcome.BETTER, "took_s": 1.0},
        {"outcome": FaultOutcome.BETTER, "took_s": 1.0},
        {"outcome": FaultOutcome.NO_BETTER, "took_s": 5.0, "lost": True},
    ]
    for number, outcome in enumerate(({}, *outcomes)):
        choice = fault_choice(question=f"q{max(0, number - 1)}", **outcome)
        course.happens(JobEvent(job="j", kind="fault_choice", at=course.at, fault_choice=choice))
    course.second()
    assert [(one.action, one.score, one.adopted) for one in course.scores] == [
        ("wait", 0.8, True),
        ("retry", None, True),
        ("wait", 0.0, True),
    ]
    assert "replace was to cost 4.00 s" in course.scores[0].reason
