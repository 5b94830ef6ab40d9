"""What a router makes of the links that its cluster's instances tell of (draft §4.3 Type 5)."""

from __future__ import annotations

import math

import pytest

from entities.router.core import TableDecision, decide_table, worth_writing
from entities.router.link_statistics import REPORTED, LinkStatistics
from entities.router.load_statistics import LoadStatistics
from schemas.signals import StagePolicy
from schemas.telemetry import InstanceSample, LinkFigures, LinkSample
from tests.builders.records import instance
from tests.builders.routes import policy
from tests.builders.telemetry import linked_sample as sample


def told(sender: str, incarnation: str = "i1", **transfer_ms: float) -> InstanceSample:
    """A sender's sample; receivers with `_` for `-`."""
    links = tuple(
        LinkSample(
            peer=sid.replace("_", "-"),
            figures=LinkFigures(
                latency_ms=ms, transfer_ms=ms, bandwidth_bytes_per_s=2e6, bytes=9, trend="slower"
            ),
        )
        for sid, ms in transfer_ms.items()
    )
    return sample(sender, incarnation=incarnation, links=links)


def statistics(*samples: InstanceSample) -> LinkStatistics:
    found = LinkStatistics()
    for one in samples:
        found.add(one)
    return found


def table(links: LinkStatistics) -> TableDecision:
    measured = LoadStatistics()
    for sid in ("j-s1-r0", "j-s1-r1"):
        for number in range(5):
            measured.add(sample(sid, service_ms=50.0, microbatches=number))
    records = [instance("j-s1-r0"), instance("j-s1-r1")]
    return decide_table(policy(), StagePolicy(stage=1, window=2), records, measured, None, links)


def test_the_table_tells_what_this_clusters_senders_measured_and_says_so() -> None:
    links = statistics(
        told("j-s0-r0", j_s1_r0=1.0, j_s1_r1=300.0), told("j-s0-r1", j_s1_r0=3.0), told("j-s2-r0", j_s1_r0=90)
    )
    first, second = table(links).entries
    assert (first.link_ms, second.link_ms) == (2.0, 300.0), "stage 2 sends gradients, and binds nothing"
    assert "worst link from j-s0-r0: 300.0 ms per transfer (latency 300.0 ms, 2.0 MB/s, slower)" in (
        second.reason
    )
    assert worth_writing(table(LinkStatistics()), table(links)) == "measured"
    assert worth_writing(table(links), table(links)) == "no"


def test_without_a_word_of_them_it_is_what_the_instance_receives() -> None:
    assert [entry.link_ms for entry in table(LinkStatistics()).entries] == [2.0, 2.0]


def test_samples_without_figures_change_nothing_and_new_ones_replace_old_ones() -> None:
    links = statistics(told("j-s0-r0", j_s1_r0=1.0), sample("j-s0-r0"))
    assert links.transfer_ms("j-s1-r0", 0) == 1.0
    links.add(told("j-s0-r0", j_s1_r0=7.0))
    assert links.transfer_ms("j-s1-r0", 0) == 7.0


def test_another_incarnation_begins_anew_and_who_is_gone_is_forgotten() -> None:
    links = statistics(told("j-s0-r0", j_s1_r0=1.0, j_s1_r1=2.0))
    links.add(told("j-s0-r0", "i2", j_s1_r0=5.0))
    assert links.transfer_ms("j-s1-r0", 0) == 5.0
    assert links.transfer_ms("j-s1-r1", 0) is None
    links.forget("j-s1-r0")
    assert links.transfer_ms("j-s1-r0", 0) is None
    links.forget("j-s0-r0")
    links.forget("never-seen")
    assert links.report("j") == ()


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1.0, 1e12])
def test_what_is_no_measurement_is_refused(absurd: float) -> None:
    links = statistics(told("j-s0-r0", j_s1_r0=1.0))
    links.add(told("j-s0-r0", j_s1_r0=absurd))
    assert (links.transfer_ms("j-s1-r0", 0), links.refused) == (1.0, 1)


def test_type_5_reports_the_slowest_links_of_the_job() -> None:
    samples = [told(f"j-s0-r{n}", j_s1_r0=float(n), j_s1_r1=100.0 + n) for n in range(10)]
    report = statistics(*samples, told("k-s0-r0", k_s1_r0=999.0)).report("j")
    assert len(report) == REPORTED
    assert [(one.sender, one.receiver) for one in report[:2]] == [
        ("j-s0-r9", "j-s1-r1"),
        ("j-s0-r8", "j-s1-r1"),
    ]


def test_nobody_tells_of_links_of_another_job() -> None:
    links = statistics(told("j-s0-r0", k_s1_r0=9_000.0))
    assert not links.knows("k-s1-r0")
    assert links.refused == 1
