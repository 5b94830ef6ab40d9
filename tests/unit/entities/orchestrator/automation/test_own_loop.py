"""What the orchestrator's own loop suggests, on simulated jobs whose slots become slow, recover, or scatter.

A simulated step takes what the model says, with the speeds of that moment and seeded noise.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from entities.orchestrator.automation.loop_memory import LoopMemory, LoopRules
from entities.orchestrator.automation.own_loop import adopted, evaluate, gains_elsewhere, renewed
from entities.orchestrator.automation.remedies import Remedy
from entities.orchestrator.automation.situation import (
    BestCut,
    FreeSlot,
    InstanceFigures,
    JobSituation,
    StageFigures,
    busy_ms,
    correction,
    mean_and_error,
    model_ms,
)
from entities.orchestrator.membership.best_cut import StageSpeeds
from schemas.actions import Migrate, MoveInstance, Recut, SetAlgorithm, SetWeights, SetWindow

WORK_MS, MICROBATCHES, REST_MS = 50.0, 12, 60.0
Speed = Callable[[str, float], float]
"""Slot, seconds → its speed then."""


def steady(slot: str, at: float) -> float:
    return 1.0


class Job:
    """A job on slots `n/0`, `n/1`, … of one node; what is suggested is carried out when it says so."""

    def __init__(
        self,
        replicas: tuple[int, ...] = (2, 2),
        *,
        spare: int = 1,
        speed: Speed = steady,
        noise: float = 0.0,
        seed: int = 0,
        algorithm: str = "expected-completion",
        carries_out: bool = True,
        best_cut: BestCut | None = None,
        layers: int = 0,
    ) -> None:
        """`layers`: of the model, which is cut evenly and may be cut anew; 0: as many as stages, uncut."""
        self.stages: list[list[str]] = []
        count = 0
        for stage, number in enumerate(replicas):
            self.stages.append([f"s{stage}-r{replica}" for replica in range(number)])
            count += number
        sids = [sid for stage in self.stages for sid in stage]
        self.slot_of = {sid: f"n/{slot}" for slot, sid in enumerate(sids)}
        self.free = [f"n/{slot}" for slot in range(count, count + spare)]
        self.speed, self.noise, self.chance = speed, noise, random.Random(seed)
        self.algorithm, self.carries_out, self.best_cut = algorithm, carries_out, best_cut
        per_stage = layers // len(replicas)
        self.cuts = tuple((per_stage * stage, per_stage * (stage + 1)) for stage in range(len(replicas)))
        self.layers, self.layer_ms, self.plan = layers, WORK_MS / max(1, per_stage), 0
        self.weights: dict[int, dict[str, float]] = {}
        self.memory, self.rules = LoopMemory(), LoopRules()
        self.at, self.step, self.looked_at, self.judged = 0.0, 0, 0.0, 0
        self.history: list[tuple[float, float, dict[str, float]]] = []
        self.suggested: list[tuple[float, Remedy]] = []

    def run(self, steps: int = 10**9, until_s: float = 1e9) -> Job:
        for _ in range(steps):
            if self.at >= until_s:
                break
            self._do_step()
            while self.looked_at + 1.0 <= self.at:
                self.looked_at += 1.0
                self._look()
        return self

    def _do_step(self) -> None:
        took = {
            sid: self._work_ms(stage)
            / self.speed(self.slot_of[sid], self.at)
            * self.chance.lognormvariate(0.0, self.noise)
            for stage, sids in enumerate(self.stages)
            for sid in sids
        }
        step_ms = model_ms([[took[sid] for sid in stage] for stage in self.stages], MICROBATCHES) + REST_MS
        step_ms *= self.chance.lognormvariate(0.0, self.noise / 2)
        self.at += step_ms / 1e3
        self.step += 1
        self.judged += 1
        self.history.append((self.at, step_ms, took))

    def _work_ms(self, stage: int) -> float:
        first, last = self.cuts[stage]
        return self.layer_ms * (last - first) if self.layers else WORK_MS

    def _best_cut(self, means: list[list[float]], step_ms: float) -> BestCut | None:
        """As the orchestrator finds it."""
        if not self.layers:
            return self.best_cut
        speeds = [
            [self._work_ms(stage) / mean for mean in stage_means] for stage, stage_means in enumerate(means)
        ]
        bare = StageSpeeds(work_ms=[self.layer_ms] * self.layers, stages=speeds, microbatches=MICROBATCHES)
        known = replace(bare, rest_ms=max(0.0, step_ms - bare.step_ms(self.cuts)))
        cuts = known.best(range(self.layers + 1))
        if cuts is None or cuts == self.cuts:
            return None
        return BestCut(
            cuts=cuts, now_ms=known.step_ms(self.cuts), then_ms=known.step_ms(cuts), copies_ms=500.0
        )

    def situation(self) -> JobSituation:
        steps = [each for each in self.history if each[0] >= self.at - 8.0]
        scale, rest_ms = correction(
            [
                (step_ms, model_ms([[took[sid] for sid in stage] for stage in self.stages], MICROBATCHES))
                for _, step_ms, took in steps
            ]
        )
        return JobSituation(
            job="j",
            step=self.step,
            steps_left=1000,
            microbatches=MICROBATCHES,
            step_ms=fmean(step_ms for _, step_ms, _ in steps),
            stages=tuple(
                StageFigures(
                    instances=tuple(
                        InstanceFigures(
                            sid=sid,
                            slot=self.slot_of[sid],
                            microbatch_ms=mean,
                            error_ms=error,
                            least_ms=self._least(sid),
                        )
                        for sid in sids
                        for mean, error in (mean_and_error([took[sid] for _, _, took in steps]),)
                    ),
                    work_ms=self._work_ms(stage),
                    weights=self.weights.get(stage, {}),
                )
                for stage, sids in enumerate(self.stages)
            ),
            scale=scale,
            rest_ms=rest_ms,
            free=tuple(FreeSlot(slot=slot, node="agent") for slot in self.free),
            measured_steps=len(steps),
            algorithm=self.algorithm,
            plan=self.plan,
            best_cut=self._best_cut(
                [[fmean(took[sid] for _, _, took in steps) for sid in sids] for sids in self.stages],
                fmean(step_ms for _, step_ms, _ in steps),
            ),
            busy="" if self.judged >= 0 else "a change is not judged yet",
        )

    def _least(self, sid: str) -> float:
        return min(took[sid] for at, step_ms, took in self.history if at + step_ms / 1e3 >= self.at - 2.5)

    def _look(self) -> None:
        if not self.history:  # of this plan no step is known yet
            return
        situation = self.situation()
        if not gains_elsewhere(situation, self.memory, 1.0, self.rules):
            situation = replace(situation, free=())
        remedies, self.memory = evaluate(situation, self.memory, self.at, self.rules)
        for remedy in remedies:
            self.suggested.append((self.at, remedy))
            if self.carries_out:
                self._carry_out(remedy)

    def _carry_out(self, remedy: Remedy) -> None:
        if remedy.renews:
            self.memory = renewed(self.memory, remedy, self.at)
            return
        self.memory = adopted(self.memory, remedy, self.at)
        action = remedy.action
        if isinstance(action, Migrate):
            self.free.append(self.slot_of[action.sid])
            self.slot_of[action.sid] = self.free.pop(0)
        if isinstance(action, MoveInstance):
            for sids in self.stages:
                if action.sid in sids:
                    sids.remove(action.sid)
            self.stages[action.stage].append(action.sid)
        if isinstance(action, Recut) and self.layers:
            assert action.cuts is not None
            self.cuts, self.plan = action.cuts, self.plan + 1
        if isinstance(action, SetWeights):
            self.weights[action.stage] = dict(action.weights)
            return
        if isinstance(action, SetAlgorithm):
            self.algorithm = action.algorithm
        self.judged = -18  # steps until the verdict, and after it
        self.history.clear()

    @property
    def actions(self) -> list[str]:
        return [remedy.key for _, remedy in self.suggested]


def slow(slot: str, factor: float, since: float, until: float = 1e9) -> Speed:
    return lambda which, at: 1.0 / factor if which == slot and since <= at < until else 1.0


def test_an_instance_leaves_a_slot_that_has_become_slow() -> None:
    job = Job(speed=slow("n/1", 4.0, 20.0)).run(until_s=60.0)
    ((at, remedy),) = job.suggested
    assert remedy.key == "migrate s0-r1"
    assert 22.0 <= at <= 26.0, at
    assert isinstance(remedy.action, Migrate)
    forecast = remedy.action.forecast
    assert forecast.step_after_s == pytest.approx((model_ms([[50, 50]] * 2, 12) + REST_MS) / 1e3, rel=0.05)
    assert "s0-r1 takes" in remedy.reason
    assert "n/4 would take 50 ms" in remedy.reason
    assert "steps that are left" in remedy.reason


def test_it_stays_when_the_slot_recovers() -> None:
    job = Job(speed=slow("n/1", 4.0, 20.0, until=50.0)).run(until_s=200.0)
    assert job.actions == ["migrate s0-r1"]


def test_a_slowness_that_passes_moves_nobody() -> None:
    assert Job(speed=slow("n/1", 4.0, 20.0, until=21.0)).run(until_s=60.0).actions == []


def test_without_a_free_slot_nobody_migrates_and_a_slow_free_slot_is_none() -> None:
    assert Job(speed=slow("n/1", 4.0, 20.0), spare=0).run(until_s=60.0).actions == []
    both: Speed = lambda slot, at: 0.25 if slot in ("n/1", "n/4") and at > 20.0 else 1.0  # noqa: E731
    job = Job(speed=both)
    job.run(until_s=120.0)
    assert job.actions.count("migrate s0-r1") <= 2, "back to the slot that it left for being slow"


def test_when_all_become_slow_another_slot_helps_nobody() -> None:
    everywhere: Speed = lambda slot, at: 0.4 if at > 20.0 else 1.0  # noqa: E731
    assert Job(speed=everywhere).run(until_s=80.0).actions == []


@pytest.mark.parametrize("seed", range(8))
def test_five_hundred_noisy_steps_move_nobody(seed: int) -> None:
    print("seed", seed)
    assert Job(noise=0.15, seed=seed).run(steps=500).actions == []
    assert len(Job(noise=0.25, seed=seed).run(steps=500).actions) <= 1, "a quarter: wrong once, not in turns"
    assert Job((3, 1), noise=0.15, seed=seed, spare=2).run(steps=500).actions.count("migrate s1-r0") == 0


@pytest.mark.parametrize("seed", range(4))
def test_five_hundred_noisy_steps_cut_nothing_anew(seed: int) -> None:
    print("seed", seed)
    assert Job((1, 1, 1, 1), noise=0.15, seed=seed, spare=0, layers=12).run(steps=500).actions == []


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_slow_stage_gives_layers_away_and_gets_them_back_once(noise: float) -> None:
    slow_stage = slow("n/1", 4.0, 20.0, until=80.0)
    job = Job((1, 1, 1, 1), speed=slow_stage, spare=0, layers=12, noise=noise, seed=3).run(until_s=75.0)
    assert job.actions == ["recut"]
    first, last = job.cuts[1]
    assert last - first == 1
    assert job.suggested[0][0] < 35.0
    job.run(until_s=200.0)
    assert job.actions == ["recut", "recut"]
    assert [last - first for first, last in job.cuts] == [3, 3, 3, 3]


@pytest.mark.parametrize("seed", range(4))
def test_bursts_of_a_noisy_neighbour_are_left_once(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(f"bursts {seed}")
    at, bursts = 20.0, []
    while at < 80.0:
        until = at + chance.uniform(1.0, 4.0)
        bursts.append((at, until, chance.uniform(0.25, 0.5)))
        at = until + chance.uniform(1.0, 4.0)

    def speed(slot: str, at: float) -> float:
        return next((one for since, until, one in bursts if slot == "n/1" and since <= at < until), 1.0)

    job = Job(speed=speed, noise=0.05, seed=seed).run(until_s=120.0)
    assert job.actions == ["migrate s0-r1"]
    assert job.suggested[0][0] < 40.0


def test_what_was_declined_is_repeated_less_and_less_often() -> None:
    job = Job(speed=slow("n/1", 4.0, 20.0), carries_out=False).run(until_s=220.0)
    times = [at for at, _ in job.suggested]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[0] == pytest.approx(10.0, abs=1.5)
    assert pauses == sorted(pauses)
    assert len(times) <= 6


def test_an_instance_moves_to_the_stage_that_all_others_wait_for() -> None:
    job = Job((3, 1), spare=0).run(until_s=40.0)
    first = job.suggested[0][1]
    assert isinstance(first.action, MoveInstance)
    assert first.action.stage == 1
    assert first.key == "move from stage 0 to 1"
    assert "stage 0: 50 + 50 + 50 ms, stage 1: 50 ms" in first.reason


def test_a_better_cut_is_suggested_where_nobody_can_move() -> None:
    cut = BestCut(cuts=((0, 5), (5, 6), (6, 12)), now_ms=1000.0, then_ms=700.0, copies_ms=900.0)
    job = Job((1, 1, 1), spare=0, best_cut=cut).run(until_s=20.0)
    remedy = job.suggested[0][1]
    assert isinstance(remedy.action, Recut)
    assert remedy.action.cuts == cut.cuts
    assert remedy.saving == pytest.approx(0.3, abs=0.01)
    assert "cut 0-4,5,6-11" in remedy.reason


def test_an_instance_goes_to_a_free_slot_rather_than_that_the_job_is_cut_anew() -> None:
    job = Job().run(until_s=10.0)
    here = job.situation()
    slowed = replace(here.stages[0].instances[1], microbatch_ms=90.0, error_ms=30.0, least_ms=200.0)
    stages = (replace(here.stages[0], instances=(here.stages[0].instances[0], slowed)), here.stages[1])
    cut = BestCut(cuts=((0, 4), (4, 10)), now_ms=560.0, then_ms=480.0, copies_ms=500.0, clear=True)
    after = replace(here, stages=stages, step_ms=480.0, best_cut=cut)
    suggested: list[str] = []
    memory = job.memory
    for second in range(4):
        found, memory = evaluate(
            replace(after, free=() if second == 0 else after.free), memory, 10.0 + second
        )
        suggested += [remedy.key for remedy in found]
    assert suggested[0] == "migrate s0-r1", "though the cut had waited for longer"


def test_turns_that_do_not_see_speeds_give_way_to_the_default_algorithm() -> None:
    job = Job(speed=slow("n/1", 3.0, 0.0), spare=0, algorithm="round-robin").run(until_s=40.0)
    assert job.actions == ["algorithm"]
    assert job.algorithm == "expected-completion"
    assert Job(spare=0, algorithm="round-robin").run(until_s=40.0).actions == []


def test_a_window_that_a_slow_link_outgrows_is_made_larger() -> None:
    job = Job(spare=0).run(until_s=10.0)
    here = job.situation()

    def suggested(link_ms: float, rest_ms: float, window: int = 2) -> list[Remedy]:
        stages = (here.stages[0], replace(here.stages[1], window=window, link_ms=link_ms))
        slow = replace(here, stages=stages, rest_ms=rest_ms, step_ms=350.0 + rest_ms)
        memory = LoopMemory()
        found: list[Remedy] = []
        for second in range(5):
            remedies, memory = evaluate(slow, memory, float(second))
            found += remedies
        return found

    (remedy,) = suggested(link_ms=120.0, rest_ms=300.0)
    assert isinstance(remedy.action, SetWindow)
    assert (remedy.action.stage, remedy.action.in_flight) == (1, 3)
    assert "a transfer into stage 1 takes 120 ms" in remedy.reason
    assert "is open for 290 ms, and 2 may be at a time" in remedy.reason
    assert suggested(link_ms=120.0, rest_ms=300.0, window=3) == []
    assert suggested(link_ms=120.0, rest_ms=5.0) == [], "steps take no longer than without links"
    assert suggested(link_ms=20.0, rest_ms=300.0) == []


def test_weights_follow_speeds_where_the_algorithm_does_not_measure() -> None:
    job = Job(speed=slow("n/1", 3.0, 0.0, until=60.0), spare=0, algorithm="least-outstanding").run(
        until_s=50.0
    )
    assert set(job.actions) == {"weights of stage 0"}
    weights = job.weights[0]
    assert weights["s0-r0"] / weights["s0-r1"] == pytest.approx(3.0, rel=0.05)
    times = [at for at, _ in job.suggested]
    assert all(after - before >= 20.0 for before, after in itertools.pairwise(times)), "renewed"
    job.run(until_s=120.0)
    assert job.weights[0]["s0-r0"] / job.weights[0]["s0-r1"] == pytest.approx(1.0, rel=0.05)
    measuring = Job(speed=slow("n/1", 3.0, 0.0), spare=0).run(until_s=50.0)
    assert measuring.actions == []


def test_weights_hold_on_while_another_change_is_judged_if_they_are_in_force() -> None:
    job = Job(speed=slow("n/1", 3.0, 0.0), spare=0, algorithm="least-outstanding").run(until_s=20.0)
    weights = dict(job.weights[0])
    job.suggested.clear()
    job.judged = -1000
    job.run(until_s=90.0)
    times = [20.0, *(at for at, _ in job.suggested), 90.0]
    assert all(after - before < 40.0 for before, after in itertools.pairwise(times))
    assert {remedy.renews for _, remedy in job.suggested} == {True}
    assert job.weights == {0: weights}
    job.weights[0] = dict.fromkeys(weights, 1.0)  # somebody else's
    job.suggested.clear()
    job.run(until_s=150.0)
    assert job.actions == []


def test_an_algorithm_is_suggested_again_before_it_lapses_while_it_holds() -> None:
    job = Job(speed=slow("n/1", 3.0, 0.0), spare=0, algorithm="round-robin").run(until_s=1300.0)
    first, second, third = [at for at, remedy in job.suggested if remedy.key == "algorithm"]
    assert [remedy.renews for _, remedy in job.suggested if remedy.key == "algorithm"] == [False, True, True]
    assert 540.0 <= second - first < 600.0
    assert 540.0 <= third - second < 600.0
    job.algorithm = "my-own"  # a person's
    job.suggested.clear()
    job.run(until_s=2000.0)
    assert "algorithm" not in job.actions


def test_too_few_steps_are_left() -> None:
    job = Job(speed=slow("n/1", 4.0, 0.0))
    job.run(until_s=12.0)
    job.suggested.clear()
    memory, at = LoopMemory(), job.at
    few = job.situation()
    for second in range(12):
        remedies, memory = evaluate(replace(few, steps_left=1), memory, at + second)
        assert remedies == ()


def test_microbatches_are_never_divided() -> None:
    assert busy_ms([10.0, 10.0], 3) == pytest.approx(20.0)
    assert busy_ms([10.0, 40.0], 5) == pytest.approx(40.0)
    assert busy_ms([10.0], 7) == pytest.approx(70.0)
    chance = random.Random(3)
    for _ in range(50):
        times = [chance.uniform(1.0, 9.0) for _ in range(chance.randint(1, 6))]
        count = chance.randint(1, 40)
        least = busy_ms(times, count)
        assert sum(int(least / time * (1 + 1e-9)) for time in times) >= count
        assert sum(int(least * (1 - 1e-6) / time) for time in times) < count
