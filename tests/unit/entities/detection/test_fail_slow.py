"""Fail-slow: who became slower than it was is found, with the figures; nobody else is ever blamed."""

from __future__ import annotations

import random

import pytest

from entities.detection.fail_slow import FailSlow, FailSlowConfig, SlowVerdict
from workers.telemetry.load import ComputeLoad

REPLICAS = tuple(f"j-s0-r{number}" for number in range(4))


class Step:
    """Samples of one job, one with each step, as its instances take them."""

    def __init__(self, seed: int, noise: float = 0.1) -> None:
        self.judge = FailSlow()
        self.random = random.Random(seed)
        self.noise = noise
        self.loads: dict[str, ComputeLoad] = {}
        self.verdicts: list[tuple[int, SlowVerdict]] = []
        self.step = 0

    def run(self, steps: int, times_ms: dict[str, float], microbatches: int = 4) -> None:
        for _ in range(steps):
            for sid, ms in times_ms.items():
                for _ in range(microbatches):
                    took = ms * self.random.lognormvariate(0, self.noise)
                    if self.random.random() < 0.02:
                        took *= 10  # a pause of the machine
                    self.loads.setdefault(sid, ComputeLoad()).measured(took / 3, took * 2 / 3)
                load = self.loads[sid]
                verdict = self.judge.observe(sid, "i1", load.service_ms, load.microbatches)
                if verdict is not None:
                    self.verdicts.append((self.step, verdict))
            self.step += 1


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_that_becomes_slower_is_found_within_five_steps_and_no_other(seed: int) -> None:
    run = Step(seed)
    usual = {sid: 50.0 * (1 + number) for number, sid in enumerate(REPLICAS)}
    run.run(20, usual)
    assert run.verdicts == []
    run.run(5, {**usual, REPLICAS[1]: 4 * usual[REPLICAS[1]]}, microbatches=2)
    ((_, verdict),) = run.verdicts
    assert (verdict.sid, verdict.incarnation, verdict.slow) == (REPLICAS[1], "i1", True)
    assert "has become slow" in verdict.evidence
    assert "ms per microbatch" in verdict.evidence
    run.run(20, {**usual, REPLICAS[1]: 4 * usual[REPLICAS[1]]})
    assert len(run.verdicts) == 1, "it is said once"
    run.run(8, usual)
    assert [verdict.slow for _, verdict in run.verdicts] == [True, False]


@pytest.mark.parametrize("seed", range(20))
def test_healthy_ones_are_not_blamed(seed: int) -> None:
    """Noise of 30 %, pauses, unequal devices, and phases in which all take twice as long."""
    run = Step(seed, noise=0.3)
    usual = {sid: 50.0 * (1 + 2 * number) for number, sid in enumerate(REPLICAS)}
    for phase in range(10):
        run.run(30, {sid: ms * (1 + phase % 2) for sid, ms in usual.items()})
    assert run.verdicts == [], f"seed {seed}"


def test_others_that_become_faster_make_nobody_slow() -> None:
    judge = FailSlow()
    for number in range(30):
        assert judge.observe("waited", "i1", 0.8, number) is None
        assert judge.observe("other", "i1", 2.0 if number < 15 else 0.2, number) is None


def test_a_warm_up_is_no_baseline_and_idle_samples_say_nothing() -> None:
    judge = FailSlow()
    for number, ms in enumerate((900.0, 400.0, 60.0, 50.0, 50.0)):
        assert judge.observe("x", "i1", ms, number) is None
    for _ in range(10):
        assert judge.observe("x", "i1", 500.0, 4) is None, "nothing was done since"
    found = [judge.observe("x", "i1", 200.0, 10 + number) for number in range(3)]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2].slow
    again = [judge.observe("x", "i2", 900.0, number) for number in range(10)]
    assert again == [None] * 10, "another incarnation is another process"


def fed(judge: FailSlow, sid: str, ms: float, work_ms: float, first: int) -> list[SlowVerdict]:
    """Twelve samples that begin with this number of microbatches."""
    found = [judge.observe(sid, "i1", ms, number, work_ms) for number in range(first, first + 12)]
    return [verdict for verdict in found if verdict is not None]


def test_who_is_given_more_layers_is_no_slower_for_it() -> None:
    judge = FailSlow()
    for sid in REPLICAS:
        assert fed(judge, sid, 50.0, 10.0, 0) == []
    assert fed(judge, REPLICAS[0], 135.0, 27.0, 20) == [], "2.7 times the work"
    (verdict,) = fed(judge, REPLICAS[0], 4 * 135.0, 27.0, 40)
    assert verdict.slow, "by its new layers it is"
    assert verdict.usual_ms == pytest.approx(135.0)
    (verdict,) = fed(judge, REPLICAS[1], 135.0, 10.0, 40)
    assert verdict.slow, "the same with the layers that it had"


def test_who_was_slow_stays_so_with_other_layers_until_it_is_well_by_these() -> None:
    judge = FailSlow()
    assert fed(judge, "x", 50.0, 10.0, 0) == []
    (verdict,) = fed(judge, "x", 200.0, 10.0, 20)
    assert verdict.slow
    assert fed(judge, "x", 100.0, 5.0, 40) == [], "half the work in half the time"
    (verdict,) = fed(judge, "x", 26.0, 5.0, 60)
    assert (verdict.slow, verdict.usual_ms) == (False, 25.0)


def test_thresholds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and factor"):
        FailSlowConfig(factor=1.3)
