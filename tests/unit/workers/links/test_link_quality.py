"""What a link is worth, from synthetic transfers with noise: latency, bandwidth, loss, trend."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from schemas.limits import LEAST_BYTES_PER_S, SLOWEST_BYTES_PER_S
from schemas.telemetry import LinkFigures
from workers.links.link_config import slowest_bytes_per_s
from workers.links.link_quality import SIZES, WINDOW, LinkBothWays, LinkQuality, LinkReporting

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Wire:
    """A link with noise: each time is multiplied by a lognormal, and one in twenty pauses for 50 ms."""

    seed: int
    latency_ms: float = 5.0
    bytes_per_s: float = 100e6
    spread: float = 0.1
    quality: LinkQuality = field(default_factory=LinkQuality)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def noisy(self, ms: float) -> float:
        pause = 50.0 if self.random.random() < 0.05 else 0.0
        return ms * self.random.lognormvariate(0, self.spread) + pause

    def send(self, *sizes: int, times: int = 1) -> Wire:
        for size in sizes * times:
            self.quality.pinged(self.noisy(self.latency_ms))
            self.quality.measured(size, self.noisy(self.latency_ms + size / self.bytes_per_s * 1e3))
        return self


@pytest.mark.parametrize(
    ("latency_ms", "bytes_per_s", "size"),
    [(0.5, 1e9, 2 * MIB), (5.0, 100e6, MIB), (20.0, 10e6, 256 * KIB), (300.0, 5e6, 2 * MIB)],
)
def test_latency_and_bandwidth_are_told_apart_though_all_transfers_have_one_size(
    latency_ms: float, bytes_per_s: float, size: int
) -> None:
    errors = []
    for seed in range(20):
        found = Wire(seed, latency_ms, bytes_per_s).send(size, times=40).quality
        assert found.latency_ms is not None
        assert found.bandwidth_bytes_per_s is not None
        assert found.cost is not None
        truth = latency_ms + size / bytes_per_s * 1e3
        errors.append(
            (
                found.latency_ms / latency_ms - 1,
                found.bandwidth_bytes_per_s / bytes_per_s - 1,
                found.cost.transfer_ms / truth - 1,
            )
        )
    worst = [max(abs(error[which]) for error in errors) for which in range(3)]
    print(
        f"{latency_ms} ms, {bytes_per_s:.0f} B/s, {size} bytes, seeds 0-19: worst errors of latency, "
        f"bandwidth, transfer {[f'{one:.1%}' for one in worst]}"
    )
    assert worst[0] < 0.15
    assert worst[1] < 0.3
    assert worst[2] < 0.15


def test_small_and_large_transfers_tell_them_apart_without_pings() -> None:
    found = LinkQuality()
    for _ in range(20):
        found.measured(100, 4.0)
        found.measured(4 * MIB, 4.0 + 40.0)
    assert found.latency_ms == pytest.approx(4.0)
    assert found.bandwidth_bytes_per_s == pytest.approx(4 * MIB / 0.040)


def test_the_cost_is_that_of_the_usual_size_and_one_snapshot_does_not_change_it() -> None:
    wire = Wire(3, spread=0.0).send(MIB, times=30).send(200 * MIB).send(MIB)
    assert wire.quality.usual_bytes == MIB
    wire.send(2 * MIB, times=100)
    assert wire.quality.usual_bytes == 2 * MIB, "the job has another size now"


def test_where_latency_is_nearly_all_the_bandwidth_is_not_known() -> None:
    found = Wire(1, latency_ms=50.0, bytes_per_s=1e9).send(64 * KIB, times=40).quality
    assert found.bandwidth_bytes_per_s is None
    assert found.cost is not None
    assert found.cost.wire_ms == 0.0


def test_a_link_that_got_worse_and_well_again_is_known_within_a_few_transfers() -> None:
    for seed in range(20):
        wire = Wire(seed).send(MIB, times=40)
        wire.latency_ms = 300.0
        wire.send(MIB, times=8)
        assert wire.quality.cost is not None
        assert wire.quality.cost.transfer_ms > 200
        assert wire.quality.latency_ms is not None
        wire.latency_ms = 5.0
        for _ in range(3):  # nothing is sent over it any more: pings alone tell
            wire.quality.pinged(5.0)
        assert wire.quality.cost.transfer_ms < 60, f"seed {seed}"


def test_a_slower_rate_shows_in_what_occupies_the_link() -> None:
    wire = Wire(5).send(MIB, times=40)
    wire.bytes_per_s = 5e6
    wire.send(MIB, times=12)
    assert wire.quality.cost is not None
    assert wire.quality.cost.wire_ms == pytest.approx(MIB / 5e6 * 1e3, rel=0.25)


def test_loss_is_the_part_of_attempts_made_again_and_costs_what_they_took() -> None:
    errors = []
    for seed in range(20):
        wire = Wire(seed, spread=0.0).send(MIB, times=20)
        clean = wire.quality.cost
        rng = random.Random(seed)
        for _ in range(200):
            if rng.random() < 0.25:
                wire.quality.lost(40.0)
            else:
                wire.quality.arrived()
        assert clean is not None
        assert wire.quality.cost is not None
        part = wire.quality.loss
        assert wire.quality.cost.transfer_ms - clean.transfer_ms == pytest.approx(40 * part / (1 - part))
        errors.append(abs(part - 0.25))
    print(f"loss 0.25, seeds 0-19: errors {[f'{error:.2f}' for error in errors]}")
    assert max(errors) < 0.25
    assert sum(errors) / 20 < 0.1


def test_one_loss_at_the_start_is_not_a_loss_of_all_and_is_forgiven() -> None:
    found = LinkQuality()
    found.lost(10.0)
    assert found.loss == 0.5
    for _ in range(200):
        found.arrived()
    assert found.loss < 0.01


def test_the_trend_comes_with_its_evidence() -> None:
    for seed in range(20):
        wire = Wire(seed).send(MIB, times=WINDOW)
        assert wire.quality.trend() == ("", "")
        wire.send(MIB, times=3 * WINDOW)
        assert wire.quality.trend()[0] == "steady", f"seed {seed}"
        wire.latency_ms = 100.0
        wire.send(MIB, times=WINDOW)
        trend, evidence = wire.quality.trend()
        assert trend == "slower", f"seed {seed}: {evidence}"
        assert f"last {WINDOW} transfers of {MIB} bytes" in evidence
        wire.send(MIB, times=WINDOW)
        assert wire.quality.trend()[0] == "steady"
        wire.latency_ms = 5.0
        wire.send(MIB, times=WINDOW)
        assert wire.quality.trend()[0] == "faster"


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e12])
def test_what_is_no_measurement_is_refused(absurd: float) -> None:
    wire = Wire(2, spread=0.0).send(MIB, times=20)
    before = wire.quality.figures()
    wire.quality.pinged(absurd)
    wire.quality.measured(MIB, absurd)
    wire.quality.measured(-1, 3.0)
    wire.quality.measured(1 << 60, 3.0)
    assert wire.quality.figures() == before
    assert wire.quality.refused == 4
    if absurd != 0.0:  # a link may break at once
        wire.quality.lost(absurd)
        assert wire.quality.refused == 5


def test_memory_is_bounded_however_many_sizes_there_are() -> None:
    found = LinkQuality()
    rng = random.Random(4)
    for _ in range(3000):
        found.pinged(rng.uniform(1, 2))
        found.measured(int(2 ** rng.uniform(11, 40)), rng.uniform(2, 90))
    assert len(found._sizes) <= SIZES
    assert found.figures() is not None


def test_nothing_measured_costs_nothing_known() -> None:
    assert LinkQuality().cost is None
    assert LinkQuality().figures() is None
    assert LinkBothWays().cost is None


def test_both_ways_add_up_and_the_slower_one_sets_the_pace() -> None:
    link = LinkBothWays()
    for _ in range(10):
        link.out.pinged(2.0)
        link.out.measured(MIB, 12.0)
        link.back.measured(MIB, 32.0, ahead=False)
        link.back.pinged(2.0)
    cost = link.cost
    assert cost is not None
    assert (cost.transfer_ms, cost.wire_ms) == (pytest.approx(44.0), pytest.approx(30.0))


def test_a_transfer_without_a_ping_ahead_waits_for_the_next() -> None:
    """Else a latency that has just risen would count as size, and stay when nothing is sent any more."""
    found = LinkQuality()
    for _ in range(9):
        found.pinged(1.0)
    for _ in range(5):
        found.measured(MIB, 301.0, ahead=False)
    for _ in range(9):
        found.pinged(300.0)
    for _ in range(9):
        found.pinged(1.0)
    assert found.cost is not None
    assert found.cost.transfer_ms < 5


def test_only_news_is_told_and_all_of_it_now_and_then() -> None:
    telling = LinkReporting()
    figures = LinkFigures(latency_ms=5.0, transfer_ms=10.0, bytes=9, trend="steady")
    assert telling.news(None, 0.0) is None
    assert telling.news(figures, 0.0) == figures
    assert telling.news(figures.model_copy(update={"transfer_ms": 10.5, "evidence": "x"}), 1.0) is None
    slower = figures.model_copy(update={"transfer_ms": 12.0})
    assert telling.news(slower, 2.0) == slower
    assert telling.news(slower, 3.0) is None
    assert telling.news(slower, 8.0) == slower
    turned = slower.model_copy(update={"trend": "slower"})
    assert telling.news(turned, 8.1) == turned
    assert telling.news(turned.model_copy(update={"loss": 0.2}), 8.2) is not None
    assert telling.news(turned.model_copy(update={"loss": 0.2, "latency_ms": None}), 8.3) is not None


def test_a_slow_link_has_the_time_that_its_measured_rate_asks_for() -> None:
    assert slowest_bytes_per_s(None) == SLOWEST_BYTES_PER_S
    assert slowest_bytes_per_s(1e9) == SLOWEST_BYTES_PER_S
    assert slowest_bytes_per_s(4e6) == 1e6
    assert slowest_bytes_per_s(1.0) == LEAST_BYTES_PER_S
