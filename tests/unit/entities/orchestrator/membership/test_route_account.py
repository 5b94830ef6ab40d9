"""Weights and avoided instances with a forecast: judged where they were the only change (ADR-0101)."""

from __future__ import annotations

import pytest

from entities.orchestrator.membership.route_account import RouteAccount
from schemas.changes import ChangeState, Forecast, JobChange

FASTER = Forecast.of(0.4, 0.3, cost_s=0.0, steps_left=100)


def weights(step: int, stage: int = 0, what: str = "a 2, b 1") -> JobChange:
    knob = f"weights of stage {stage}"
    return JobChange(
        kind="weights", what=f"{knob}: {what}", direction=f"{knob} by m", step=step, by="m", forecast=FASTER
    )


def after_steps(count: int = 8, step_s: float = 0.4) -> RouteAccount:
    account = RouteAccount()
    decide(account, count, step_s)
    return account


def decide(account: RouteAccount, count: int, step_s: float) -> list[JobChange]:
    news = (account.decided(step_s) for _ in range(count))
    return [change for change in news if change is not None]


@pytest.mark.parametrize(("step_s", "state"), [(0.3, ChangeState.BETTER), (0.4, ChangeState.NO_BETTER)])
def test_eight_steps_judge_them(step_s: float, state: ChangeState) -> None:
    account = after_steps()
    [begun] = account.begin(weights(9), "")
    assert begun.state is ChangeState.IN_EFFECT
    assert decide(account, 9, step_s) == []
    [judged] = decide(account, 1, step_s)
    assert (judged.state, judged.before_s, judged.after_s) == (state, 0.4, step_s)
    assert account.recorded == (judged,)


def test_what_was_no_better_is_not_tried_again_for_a_while() -> None:
    account = after_steps()
    account.begin(weights(9), "")
    decide(account, 10, 0.5)
    assert account.unwise("weights of stage 0 by m", 20) == (
        "was tried at step 9 (no better: 0.400 → 0.500 s a step); it may be tried again from step 49"
    )
    assert account.unwise("weights of stage 0 by n", 20) == ""
    assert account.unwise("weights of stage 0 by m", 49) == ""


def test_weights_that_are_replaced_before_long_are_not_judged_and_the_next_are_compared_with_them() -> None:
    account = after_steps()
    account.begin(weights(9), "")
    decide(account, 8, 0.3)
    replaced, begun = account.begin(weights(17, what="a 3, b 1"), "")
    assert replaced.state is ChangeState.UNDONE
    assert replaced.note == "not judged: weights of stage 0: a 3, b 1 came after it, 8 steps later"
    assert (begun.state, begun.before_s) == (ChangeState.IN_EFFECT, 0.3)
    decide(account, 1, 0.3)
    _, third = account.begin(weights(18), "")
    assert third.note == "not judged: only 0 steps are known to compare with"


def test_they_are_not_judged_beside_another_change() -> None:
    account = after_steps()
    [begun] = account.begin(weights(9), "window of stage 0: 4 → 6 is not judged yet")
    assert begun.state is ChangeState.UNDONE
    assert begun.note == "not judged: window of stage 0: 4 → 6 is not judged yet"
    assert account.open is None
    decide(account, 8, 0.4)
    account.begin(weights(20), "")
    decide(account, 3, 0.3)
    [undone] = account.disturbed("replicas: 2 → 3 came after it")
    assert undone.note == "not judged: replicas: 2 → 3 came after it, 3 steps later"
    assert decide(account, 20, 0.3) == []


def test_they_end_without_a_verdict_when_they_lapse_or_the_job_does() -> None:
    account = after_steps()
    account.begin(weights(9), "")
    [lapsed] = account.ended("weights of stage 0 by m")
    assert lapsed.note == "not judged: it ended"
    decide(account, 8, 0.4)
    account.begin(weights(20), "")
    over = account.decided(0.3, last=True)
    assert over is not None
    assert over.note == "not judged: the job ended 1 steps after it"


def test_routes_that_end_beside_those_under_judgement_or_after_their_verdict_leave_nothing_to_compare() -> (
    None
):
    account = after_steps()
    account.begin(weights(9), "")
    [undone] = account.ended("weights of stage 1 by n")
    assert undone.note == "not judged: weights of stage 1 by n ended"
    decide(account, 8, 0.4)
    account.begin(weights(20), "")
    decide(account, 10, 0.3)
    assert account.ended("weights of stage 0 by m") == []
    [next_] = account.begin(weights(30), "")
    assert next_.note == "not judged: only 0 steps are known to compare with"
