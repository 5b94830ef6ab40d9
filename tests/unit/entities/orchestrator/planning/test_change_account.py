"""Which moves between stages are granted, and what is learned from each."""

from __future__ import annotations

import random

import pytest

from entities.orchestrator.membership.stage_moves import StageMembers, direction, impossible
from entities.orchestrator.planning.change_account import ChangeAccount, ChangeRules, in_words
from schemas.changes import ChangeState, Forecast, JobChange
from schemas.job import StepResult
from tests.builders.jobs import step_result
from tests.builders.policies import stage_move

CREW = StageMembers(
    working={0: ["s0-r0", "s0-r1", "s0-r2"], 1: ["s1-r0"], 2: ["s2-r0", "s2-r1"]},
    standbys=frozenset({"s1-r9"}),
)
BACK = StageMembers(working={0: ["s0-r0", "s0-r1"], 1: ["s1-r0", "s1-r1"]})
WORTH_IT = Forecast(step_before_s=0.4, step_after_s=0.25, cost_s=1.0, gain_s=15.0, steps_left=100)
AWAY, NEWCOMER = "s0-r2", "s1-r1"


def unwise(account: ChangeAccount, sid: str, stage: int, forecast: Forecast, crew: StageMembers) -> str:
    here = crew.stage_of(sid)
    return account.unwise("move", direction(here, stage), direction(stage, here), forecast)


class Run:
    """A job's steps, each as long as it is said to take."""

    def __init__(self, history: list[JobChange] | None = None) -> None:
        self.moves = ChangeAccount(list(history or []))
        self.step = 0
        self.sids = ["s0-r0", "s0-r1", "s0-r2", "s1-r0"]

    def steps(self, count: int, step_s: float, *, last: bool = False) -> list[JobChange]:
        """Returns the news."""
        news = []
        for number in range(count):
            found = self.moves.decided(self._result(step_s), last=last and number == count - 1)
            news += [found] if found is not None else []
            self.step += 1
        return news

    def _result(self, step_s: float) -> StepResult:
        return step_result(self.step, step_s=step_s, shares=dict.fromkeys(self.sids, 2))

    def begin(self, forecast: Forecast | None = WORTH_IT, here: int = 0, there: int = 1) -> JobChange:
        self.sids.remove(AWAY)
        ends = {"from_stage": here, "to_stage": there, "step": self.step}
        return self.moves.begin(stage_move(sid=AWAY, newcomer=NEWCOMER, **ends, forecast=forecast))

    def join(self) -> None:
        self.sids.append(NEWCOMER)

    def moved(self, after_s: float) -> JobChange:
        """A whole move: 8 steps of 0.4 s before it, 2 without the one that moves, then `after_s` each."""
        self.steps(8, 0.4)
        self.begin()
        self.steps(2, 0.5)
        self.join()
        return self.steps(10, after_s)[-1]


def test_a_move_is_measured_and_told_twice_more() -> None:
    run = Run()
    run.steps(8, 0.4)
    began = run.begin()
    assert (began.state, began.before_s) == (ChangeState.UNDER_WAY, 0.4)
    assert run.steps(2, 0.5) == []
    run.join()
    [joined] = run.steps(1, 0.3)
    assert joined.state is ChangeState.IN_EFFECT
    assert joined.cost_s == pytest.approx(0.2)
    assert run.steps(8, 0.25) == []
    [judged] = run.steps(1, 0.25)
    assert (judged.state, judged.after_s) == (ChangeState.BETTER, 0.25)
    assert in_words(judged) == (
        "s0-r2 (stage 0) → s1-r1 (stage 1), better; predicted 0.400 → 0.250 s a step, cost 1.0 s, "
        "gain 15.0 s in 100 steps; measured cost 0.20 s, 0.400 → 0.250 s a step"
    )
    assert run.moves.open is None
    assert run.moves.recorded == (judged,)


@pytest.mark.parametrize("after_s", [0.395, 0.4, 0.6])
def test_what_came_out_no_better_is_not_tried_again_even_by_a_new_orchestrator(after_s: float) -> None:
    run = Run()
    judged = run.moved(after_s)
    assert judged.state is ChangeState.NO_BETTER
    for later in (run, Run(list(run.moves.recorded))):
        later.steps(20, 0.4)
        refused = unwise(later.moves, "s0-r1", 1, WORTH_IT, CREW)
        assert refused == f"was tried at step 8 (no_better: 0.400 → {after_s:.3f} s a step)"


def test_a_good_move_is_not_taken_back_unless_steps_have_become_longer() -> None:
    run = Run()
    assert run.moved(0.25).state is ChangeState.BETTER
    crew = StageMembers(working={0: ["s0-r0", "s0-r1"], 1: ["s1-r0", NEWCOMER]})
    forecast = WORTH_IT.model_copy(update={"step_before_s": 0.25, "step_after_s": 0.2})
    run.steps(10, 0.25)
    assert unwise(run.moves, NEWCOMER, 0, forecast, crew).startswith("would take back the change of step 8")
    run.steps(10, 0.28)
    assert unwise(run.moves, NEWCOMER, 0, forecast, crew) == ""


def test_the_next_move_waits_for_a_verdict_and_a_cooldown() -> None:
    run = Run()
    run.steps(8, 0.4)
    run.begin()
    assert "is not judged yet" in run.moves.obstacle()
    run.join()
    run.steps(10, 0.3)
    assert run.moves.obstacle() == ""
    assert (
        unwise(run.moves, "s2-r1", 1, WORTH_IT, CREW) == "the last change was judged 0 steps ago; wait for 8"
    )
    run.steps(8, 0.3)
    assert unwise(run.moves, "s2-r1", 1, WORTH_IT, CREW) == ""


def test_without_steps_to_compare_with_nobody_moves() -> None:
    run = Run()
    run.steps(3, 0.4)
    assert "nothing to compare with" in unwise(run.moves, AWAY, 1, WORTH_IT, CREW)


@pytest.mark.parametrize(
    ("sid", "stage", "why"),
    [
        ("s1-r0", 0, "s1-r0 is the last replica of stage 1"),
        ("s1-r9", 0, "s1-r9 is a standby: it is there for its stage alone"),
        ("s0-r0", 0, "s0-r0 is in stage 0 already"),
        ("s0-r0", 7, "there is no stage 7"),
        ("s0-r8", 1, "s0-r8 works in no stage now"),
    ],
)
def test_what_can_not_be(sid: str, stage: int, why: str) -> None:
    assert impossible(sid, stage, CREW) == why


def test_nobody_moves_while_somebody_comes() -> None:
    crew = StageMembers(working=CREW.working, coming=("s2-r2",))
    assert impossible(AWAY, 1, crew) == "s2-r2 must have joined first"


@pytest.mark.parametrize(
    ("after_s", "cost_s", "gain_s", "why"),
    [
        (0.38, 1.0, 15.0, "would save 5% of a step, less than 10%"),
        (0.5, 1.0, 15.0, "would save -25% of a step, less than 10%"),
        (0.25, 20.0, 15.0, "would gain 15.0 s and cost 20.0 s"),
        (0.25, 1.0, -5.0, "would gain -5.0 s and cost 1.0 s"),
    ],
)
def test_a_poor_forecast_is_declined(after_s: float, cost_s: float, gain_s: float, why: str) -> None:
    run = Run()
    run.steps(8, 0.4)
    forecast = WORTH_IT.model_copy(update={"step_after_s": after_s, "cost_s": cost_s, "gain_s": gain_s})
    assert unwise(run.moves, AWAY, 1, forecast, CREW) == why


def test_a_forecast_from_other_steps_than_these_is_not_believed() -> None:
    run = Run()
    run.steps(8, 0.1)
    assert (
        unwise(run.moves, AWAY, 1, WORTH_IT, CREW) == "forecast for steps of 0.400 s, but they take 0.100 s"
    )


def test_one_that_can_not_be_started_there_is_not_tried_again() -> None:
    run = Run()
    run.steps(8, 0.4)
    run.begin()
    failed = run.moves.fail()
    assert failed is not None
    assert failed.state is ChangeState.FAILED
    run.steps(20, 0.4)
    assert unwise(run.moves, AWAY, 1, WORTH_IT, CREW) == "was tried at step 8 (failed)"


def test_a_disturbed_move_is_not_judged_and_may_be_tried_again() -> None:
    run = Run()
    run.steps(8, 0.4)
    run.begin()
    undone = run.moves.disturbed()
    assert undone is not None
    assert undone.state is ChangeState.UNDONE
    assert run.moves.disturbed() is None
    run.steps(20, 0.4)
    assert unwise(run.moves, AWAY, 1, WORTH_IT, CREW) == ""


def test_at_the_end_of_a_job_what_is_known_must_do() -> None:
    run = Run()
    run.steps(8, 0.4)
    run.begin()
    run.join()
    assert run.steps(5, 0.2, last=True)[-1].state is ChangeState.BETTER
    short = Run()
    short.steps(8, 0.4)
    short.begin()
    assert short.steps(1, 0.4, last=True)[-1].state is ChangeState.UNDONE


@pytest.mark.parametrize("seed", range(20))
def test_no_oscillation_whatever_a_policy_wants(seed: int) -> None:
    """A policy that always wants the next move, back or forth, gets at most two of a pair of stages."""
    draw = random.Random(seed)
    run = Run()
    granted: list[tuple[int, int]] = []
    here, there = 0, 1
    for _ in range(400):
        run.steps(1, 0.4 * draw.uniform(0.98, 1.02))
        crew = StageMembers(working={here: [AWAY, "x"], there: ["y", "z"]})
        refused = run.moves.obstacle() or unwise(run.moves, AWAY, there, WORTH_IT, crew)
        if not refused:
            granted.append((here, there))
            if AWAY not in run.sids:
                run.sids.append(AWAY)
            run.begin(here=here, there=there)
            if NEWCOMER not in run.sids:
                run.join()
            here, there = there, here
    assert len(granted) <= 2, f"seed {seed}: {granted}"


def test_only_the_last_moves_are_kept() -> None:
    moves = ChangeAccount(rules=ChangeRules())
    for step in range(40):
        moves.begin(stage_move(sid=AWAY, newcomer=NEWCOMER, step=step))
        moves.disturbed()
    assert [move.step for move in moves.recorded] == list(range(24, 40))


def test_what_was_found_out_under_other_speeds_forbids_nothing() -> None:
    run = Run()
    run.moves.speeds = {"n/0": 0.25, "n/1": 1.0}
    assert run.moved(0.3).state is ChangeState.BETTER
    run.steps(10, 0.3)
    back = WORTH_IT.model_copy(update={"step_before_s": 0.3, "step_after_s": 0.2})
    assert "a step still takes 0.300 s as after it" in unwise(run.moves, "s1-r1", 0, back, BACK)
    run.moves.speeds = {"n/0": 0.3, "n/1": 1.0}
    assert unwise(run.moves, "s1-r1", 0, back, BACK), "about as slow as it was"
    run.moves.speeds = {"n/0": 1.0, "n/1": 1.0}
    assert unwise(run.moves, "s1-r1", 0, back, BACK) == ""


def test_after_a_verdict_nobody_waits_if_a_slot_has_become_another() -> None:
    run = Run()
    run.moves.speeds = {"n/0": 0.25, "n/1": 1.0}
    assert run.moved(0.3).state is ChangeState.BETTER
    assert "wait for 8" in run.moves.too_soon()
    run.moves.speeds = {"n/0": 0.3, "n/1": 1.0}
    assert "wait for 8" in run.moves.too_soon()
    run.moves.speeds = {"n/0": 1.0, "n/1": 1.0}
    assert run.moves.too_soon() == ""


def test_a_slot_that_recovers_meanwhile_leaves_nothing_to_judge_and_nothing_to_wait_for() -> None:
    run = Run()
    run.moves.speeds = {"n/0": 0.25, "n/1": 1.0}
    run.steps(8, 0.4)
    run.begin()
    run.join()
    run.steps(4, 0.3)
    run.moves.speeds = {"n/0": 1.0, "n/1": 1.0}
    (news,) = run.steps(1, 0.3)
    assert news.state is ChangeState.UNDONE
    assert "only 2 steps" in run.moves.too_soon()
    run.steps(2, 0.3)
    assert run.moves.too_soon() == ""


SCALE = JobChange(kind="scale", what="replicas", direction="more", step=8, by="m", forecast=WORTH_IT)
CUT_ANEW = SCALE.model_copy(update={"kind": "recut", "what": "cut"})


@pytest.mark.parametrize(
    ("change", "speed", "is_judged"),
    [
        (SCALE.model_copy(update={"replicas": (1, 3)}), 0.5, True),
        (SCALE.model_copy(update={"replicas": (1, 3)}), 2.0, False),
        (SCALE.model_copy(update={"replicas": (3, 1)}), 2.0, True),
        (SCALE.model_copy(update={"replicas": (3, 1)}), 0.5, False),
        (CUT_ANEW, 0.5, True),
        (CUT_ANEW, 2.0, True),
        (CUT_ANEW, 3.0, False),
    ],
)
def test_what_a_change_does_to_slots_is_a_part_of_its_effect(
    change: JobChange, speed: float, is_judged: bool
) -> None:
    run = Run()
    run.moves.speeds = {"n/0": 1.0}
    run.steps(8, 0.4)
    run.moves.begin(change)
    run.moves.speeds = {"n/0": speed}
    news = run.steps(10, 0.4)[-1]
    assert news.state is (ChangeState.NO_BETTER if is_judged else ChangeState.UNDONE)
