"""What a sweep does next, driven against a queue that is played, with the driver forgetting everything."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from dmsc.sweeps.schedule import SweepAction, SweepPlan, TrialView, decide, promoted, ranked
from schemas.job import ENDED, JobState

RUNGS, STEPS = (10, 30), 60


@dataclass
class Played:
    """A trial's job: its objective after `step` steps is `quality` / `step`."""

    quality: float
    step: int = 0
    state: JobState = JobState.RUNNING
    stopped: bool = False

    def view(self) -> TrialView:
        passed = {rung: self.quality / rung for rung in RUNGS if rung <= self.step}
        return TrialView(state=self.state, at_rung=passed, stopped=self.stopped)

    def work(self, steps: int) -> None:
        if self.state in ENDED or self.state is JobState.PARKED:
            return
        if self.stopped:
            self.state = JobState.PARKED
            return
        self.step = min(STEPS, self.step + steps)
        if self.step == STEPS:
            self.state = JobState.DONE


@dataclass
class Queue:
    """Jobs that do what they are told, sometimes late."""

    jobs: dict[int, Played] = field(default_factory=dict)
    actions: list[SweepAction] = field(default_factory=list)

    def take(self, action: SweepAction) -> None:
        self.actions.append(action)
        job = self.jobs.get(action.trial)
        assert job is not None
        assert job.state not in ENDED
        if action.kind == "park":
            job.stopped = True
        elif action.kind == "resume":
            job.stopped, job.state = False, JobState.RUNNING
        else:
            job.state = JobState.CANCELLED


@pytest.mark.parametrize("seed", range(20))
def test_halving_keeps_the_best_whatever_is_slow(seed: int) -> None:
    draw = random.Random(seed)
    print(f"seed {seed}")
    plan = SweepPlan(trials=9, rungs=RUNGS, factor=3)
    queue = Queue({trial: Played(float(trial + 1)) for trial in range(9)})
    for _ in range(1_000):
        decision = decide(plan, {trial: job.view() for trial, job in queue.jobs.items()})
        if decision.over:
            break
        for action in decision.actions:
            if draw.random() < 0.7:  # the driver dies in between, and decides anew
                queue.take(action)
        for job in queue.jobs.values():  # some have no slots
            job.work(draw.choice((0, 3, 7)))
    assert decision.over
    states = [queue.jobs[trial].state for trial in range(9)]
    assert states == [JobState.DONE, *[JobState.CANCELLED] * 8]
    left_out = [action.trial for action in queue.actions if action.kind == "cancel"]
    assert set(left_out[:6]) == set(range(3, 9)), "at the first rung"
    assert set(left_out[6:]) == {1, 2}, "at the second"


def test_without_rungs_every_trial_runs() -> None:
    plan = SweepPlan(trials=3)
    running, done = TrialView(state=JobState.RUNNING), TrialView(state=JobState.DONE)
    waiting = TrialView(state=JobState.QUEUED)
    decision = decide(plan, {0: running, 1: done, 2: waiting})
    assert (decision.actions, decision.over) == ((), False)
    assert decide(plan, {0: done, 1: TrialView(state=JobState.FAILED), 2: done}).over


def test_a_failed_trial_holds_nobody_up() -> None:
    plan = SweepPlan(trials=2, rungs=(10,), factor=2)
    views = {
        0: TrialView(state=JobState.FAILED),
        1: TrialView(state=JobState.PARKED, at_rung={10: 1.0}, stopped=True),
    }
    (action,) = decide(plan, views).actions
    assert (action.kind, action.trial) == ("resume", 1)


def test_a_trial_that_somebody_else_parked_is_left_alone() -> None:
    views = {0: TrialView(state=JobState.PARKED), 1: TrialView(state=JobState.DONE)}
    decision = decide(SweepPlan(trials=2), views)
    assert (decision.actions, decision.over) == ((), False)


def test_ranks() -> None:
    values = {0: 2.0, 1: float("nan"), 2: 1.0, 3: 2.0}
    assert ranked(values, minimise=True) == [2, 0, 3, 1]
    assert ranked(values, minimise=False) == [0, 3, 2, 1]
    assert promoted(values, SweepPlan(trials=4, factor=2)) == [0, 2]
    assert promoted({5: 1.0}, SweepPlan(trials=9, factor=3)) == [5]
