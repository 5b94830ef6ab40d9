"""Which move between stages is best (SWARM §3.2), and when none is."""

from __future__ import annotations

import math
import random

import pytest

from policies.numerics.allocation.stage_balance import (
    MoveLimits,
    Proposal,
    Situation,
    StageSituation,
    Worker,
    best_move,
    makespan_ms,
    throughput_bound,
)

LIMITS = MoveLimits()


def situation(
    *stages: list[float],
    microbatches: int = 12,
    costs: tuple[float, ...] = (),
    overhead: float = 0.05,
    **more: float,
) -> Situation:
    """Stages by their workers' milliseconds; a step takes its slowest stage's makespan and some more."""
    told = {
        stage: StageSituation(
            workers=tuple(
                Worker(sid=f"s{stage}-r{number}", service_ms=ms) for number, ms in enumerate(times)
            ),
            cost_ms=costs[stage] if costs else 0.0,
            state_bytes=1_000_000,
        )
        for stage, times in enumerate(stages)
    }
    span = max(makespan_ms(times, microbatches) for times in stages if all(_sound(ms) for ms in times))
    return Situation(
        stages=told,
        microbatches=microbatches,
        step_s=more.get("step_s", span / 1e3 + overhead),
        steps_left=int(more.get("steps_left", 1000)),
        bytes_per_s=more.get("bytes_per_s", 1e8),
    )


def _sound(ms: float) -> bool:
    return math.isfinite(ms) and ms > 0


def after(found: Proposal, before: Situation) -> Situation:
    """The situation once a proposal was carried out, and came out as it said."""
    stages = dict(before.stages)
    giving, taking = stages[found.from_stage], stages[found.to_stage]
    kept = tuple(one for one in giving.workers if one.sid != found.sid)
    there = Worker(sid=f"{found.sid}m", service_ms=found.service_ms)
    stages[found.from_stage] = StageSituation(workers=kept, cost_ms=giving.cost_ms)
    stages[found.to_stage] = StageSituation(workers=(*taking.workers, there), cost_ms=taking.cost_ms)
    return Situation(
        stages=stages,
        microbatches=before.microbatches,
        step_s=found.forecast.step_after_s,
        steps_left=before.steps_left,
        bytes_per_s=before.bytes_per_s,
    )


def test_one_of_three_on_the_cheap_stage_goes_to_the_heavy_one() -> None:
    before = situation([10.0, 10.0, 10.0], [60.0], costs=(10.0, 60.0))
    found = best_move(before, LIMITS)
    assert isinstance(found, Proposal)
    assert (found.from_stage, found.to_stage, found.service_ms) == (0, 1, 60.0)
    assert found.bound_before == pytest.approx(1000 / 60)
    assert found.bound_after == pytest.approx(2000 / 60)
    assert found.bound_after == pytest.approx(throughput_bound(after(found, before).stages))
    assert found.forecast.step_before_s == pytest.approx(0.77)
    assert found.forecast.step_after_s == pytest.approx(0.05 + 6 * 0.06)
    assert found.forecast.gain_s == pytest.approx(360.0)
    assert found.forecast.cost_s == pytest.approx(1.01)


def test_the_one_that_is_least_missed_goes() -> None:
    """The fast one is needed where it is; the slow one still doubles nothing, but helps."""
    found = best_move(situation([10.0, 40.0], [20.0], costs=(10.0, 10.0)), LIMITS)
    assert isinstance(found, Proposal)
    assert found.sid == "s0-r1"


def test_without_analysed_costs_the_medians_of_the_stages_must_do() -> None:
    found = best_move(situation([10.0, 10.0], [40.0]), LIMITS)
    assert isinstance(found, Proposal)
    assert found.service_ms == pytest.approx(40.0)


def test_whole_microbatches_count() -> None:
    """Six on four equal instances take as long as on three: the bound promises what no step can give."""
    assert makespan_ms([10.0] * 3, 6) == makespan_ms([10.0] * 4, 6) == pytest.approx(20.0)
    assert makespan_ms([10.0, 30.0], 4) == pytest.approx(30.0)
    found = best_move(situation([1.0] * 3, [10.0] * 3, microbatches=6, costs=(1.0, 10.0)), LIMITS)
    assert found == "the best move would save 0% of a step"


@pytest.mark.parametrize("seed", range(20))
def test_makespan_is_that_of_handing_out_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    times = [draw.uniform(1, 50) for _ in range(draw.randint(1, 6))]
    count = draw.randint(1, 200)
    free = [0.0] * len(times)
    for _ in range(count):
        next_one = min(range(len(times)), key=lambda index: free[index] + times[index])
        free[next_one] += times[next_one]
    assert makespan_ms(times, count) == pytest.approx(max(free)), f"seed {seed}"


def test_the_last_replica_of_a_stage_stays() -> None:
    found = best_move(situation([1.0], [50.0], costs=(1.0, 50.0)), LIMITS)
    assert found == "stage 1 is the slowest, and no other has a replica to spare"


@pytest.mark.parametrize("seed", range(20))
def test_equal_stages_are_left_alone_under_noise(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        noisy = [[20.0 * draw.uniform(0.8, 1.25) for _ in range(3)] for _ in range(3)]
        found = best_move(situation(*noisy, microbatches=24, costs=(20.0,) * 3), LIMITS)
        assert isinstance(found, str), f"seed {seed}: {found}"


@pytest.mark.parametrize("seed", range(20))
def test_a_move_is_never_taken_back_by_what_it_brings(seed: int) -> None:
    """Moves go on while they help, never empty a stage, and end: no instance comes back to where it was."""
    draw = random.Random(seed)
    costs = tuple(draw.uniform(5, 60) for _ in range(4))
    pace = [[draw.uniform(0.7, 1.6) for _ in range(draw.randint(1, 5))] for _ in costs]
    times = [[cost * each for each in paces] for cost, paces in zip(costs, pace, strict=True)]
    now = situation(*times, microbatches=48, costs=costs)
    pairs: list[tuple[int, int]] = []
    while isinstance(found := best_move(now, LIMITS), Proposal):
        assert found.forecast.improvement >= LIMITS.min_improvement
        assert found.bound_after > found.bound_before
        assert (found.to_stage, found.from_stage) not in pairs[-1:], f"seed {seed}: {pairs}"
        pairs.append((found.from_stage, found.to_stage))
        now = after(found, now)
        assert all(state.workers for state in now.stages.values())
        assert len(pairs) < 20, f"seed {seed}: {pairs}"


@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0, math.inf])
def test_absurd_measurements_move_nobody(bad: float) -> None:
    assert "could be believed" in best_move(situation([10.0, bad, 10.0], [60.0]), LIMITS)
    assert "no step time" in best_move(situation([10.0, 10.0], [60.0], step_s=bad), LIMITS)


def test_measurements_that_contradict_each_other_move_nobody() -> None:
    assert str(best_move(situation([10.0, 10.0], [60.0], step_s=0.1), LIMITS)).startswith("contradictory")


def test_a_gain_that_comes_too_late_is_no_gain() -> None:
    found = best_move(situation([10.0, 10.0], [60.0], costs=(10.0, 60.0), steps_left=4), LIMITS)
    assert found == "the best move would gain 1.4 s in 4 steps and cost 1.0 s"
    assert best_move(situation([10.0, 10.0], [60.0], steps_left=0), LIMITS) == "the job is at its end"


def test_a_large_state_over_a_slow_link_costs_more() -> None:
    found = best_move(situation([10.0, 10.0], [60.0], bytes_per_s=1e4, steps_left=100_000), LIMITS)
    assert isinstance(found, Proposal)
    assert found.forecast.cost_s == pytest.approx(101.0)
    unmeasured = best_move(situation([10.0, 10.0], [60.0], bytes_per_s=math.nan), LIMITS)
    assert isinstance(unmeasured, Proposal)
    assert unmeasured.forecast.cost_s == pytest.approx(1.02)


def test_nothing_to_compare_moves_nobody() -> None:
    assert best_move(situation([10.0, 10.0]), LIMITS) == "there is only one stage"
    empty = Situation(
        stages={0: StageSituation(workers=()), 1: StageSituation(workers=())},
        microbatches=4,
        step_s=1.0,
        steps_left=10,
        bytes_per_s=1.0,
    )
    assert best_move(empty, LIMITS) == "stage 0 has nobody"
