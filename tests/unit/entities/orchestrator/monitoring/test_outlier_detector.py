"""The core of a job's alerts: silent on quiet runs, awake on what is abnormal, and quiet again."""

from __future__ import annotations

import math
import random

import pytest

from entities.orchestrator.monitoring.alerts import LOG_NORM, LOSS
from entities.orchestrator.monitoring.outlier_detector import OutlierConfig, OutlierDetector

STEPS = 2_000


def quiet_run(seed: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of a run that goes well: power laws, noise with long tails (Student's t, 5)."""
    rng = random.Random(seed)

    def noise(width: float) -> float:
        chi_square = math.fsum(rng.gauss(0, 1) ** 2 for _ in range(5))
        return math.exp(width * rng.gauss(0, 1) / math.sqrt(chi_square / 5))

    return [
        (
            (1.5 + 4 * (1 + step / 20) ** -0.7) * noise(0.02),
            (0.3 + 3 * (1 + step / 30) ** -0.5) * noise(0.15),
        )
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_alarm_in_a_quiet_run(seed: int) -> None:
    loss, norm = OutlierDetector(LOSS), OutlierDetector(LOG_NORM)
    run = quiet_run(seed)
    print("seed", seed)
    assert [turn for value, _ in run if (turn := loss.observe(value)) is not None] == []
    assert [turn for _, value in run if (turn := norm.observe(math.log(value))) is not None] == []


@pytest.mark.parametrize("seed", range(20))
def test_a_spike_is_told_once_and_its_end(seed: int) -> None:
    print("seed", seed)
    trigger = OutlierDetector(LOSS)
    turns = []
    for step, (value, _) in enumerate(quiet_run(seed)[:400]):
        spiked = value * 2.5 if 300 <= step < 308 else value
        if (turn := trigger.observe(spiked)) is not None:
            turns.append((step, turn.raised))
    assert turns == [(300, True), (308, False)]


@pytest.mark.parametrize("absurd", [math.nan, math.inf])
def test_what_is_no_number_is_an_alarm(absurd: float) -> None:
    trigger = OutlierDetector(LOSS)
    for step in range(30):
        assert trigger.observe(2.0 + step % 3 / 100) is None
    turn = trigger.observe(absurd)
    assert turn is not None
    assert (turn.raised, turn.z) == (True, math.inf)
    back = trigger.observe(2.0)
    assert back is not None
    assert not back.raised


def test_what_stays_becomes_usual_and_a_flat_series_makes_no_alarm_of_nothing() -> None:
    trigger = OutlierDetector(OutlierConfig(window=10, warmup=5, settles=10))
    assert all(trigger.observe(1.0) is None for _ in range(20))
    assert trigger.observe(1.01) is None
    first = trigger.observe(9.0)
    assert first is not None
    assert first.raised
    turns = [trigger.observe(9.0) for _ in range(40)]
    assert [turn.raised for turn in turns if turn is not None] == [False]


def test_confirmation_and_cool_down() -> None:
    config = OutlierConfig(window=10, warmup=5, confirm=2, cooldown=4)
    trigger = OutlierDetector(config)
    for _ in range(10):
        trigger.observe(1.0)
    assert trigger.observe(5.0) is None  # once is not enough
    assert trigger.observe(1.0) is None
    told = [trigger.observe(value) for value in (5.0, 5.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0)]
    assert [index for index, turn in enumerate(told) if turn is not None] == [1, 2, 7]


def test_settings_that_can_not_be() -> None:
    with pytest.raises(ValueError, match="clear_z"):
        OutlierConfig(clear_z=12)
    with pytest.raises(ValueError, match="warmup"):
        OutlierConfig(warmup=99)
