"""What a router tells of its cluster's instances when it is asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from entities import metrics as m
from entities.router.samples import InstanceSamples
from schemas.telemetry import DataFigures, DeviceSample, InstanceSample, LinkFigures, LinkSample, SessionLoad
from tests.builders import telemetry


def sample(sid: str = "j-s0-r0", **figures: Any) -> InstanceSample:
    """Of one that has computed nothing yet."""
    fields = {"cluster": "a", "node": "n", "service_ms": 0.0, "microbatches": 0}
    return telemetry.sample(sid, **fields | figures)


def table(readings: Iterable[m.MetricReading]) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for reading in readings:
        found.setdefault(reading.metric.name, {})[reading.labels] = reading.value
    return found


def test_gauges_are_the_last_samples_in_base_units() -> None:
    book = InstanceSamples("a")
    book.take(sample(queue=1, busy=0.2))
    book.take(sample(queue=3, busy=0.75, service_ms=120.0, microbatches=9, reduce_ms=4.0))
    book.take(sample("j-s0-r1", busy=0.25))
    found = table(book.readings({"j-s0-r0", "j-s0-r1"}))
    here = ("j", "0", "j-s0-r0", "a")
    assert found["dmsc_instance_queue_microbatches"][here] == 3
    assert found["dmsc_instance_service_seconds"] == {here: 0.12}  # r1 has computed nothing yet
    assert found["dmsc_instance_allreduce_seconds"] == {here: 0.004}
    assert found["dmsc_stage_bubble_ratio"] == {("j", "0", "a"): 0.5}


def test_what_an_instance_that_serves_has_room_for() -> None:
    book = InstanceSamples("a")
    book.take(sample(serving=SessionLoad(sessions=3, rows=100, free_rows=40, wave_ms=20.0)))
    book.take(sample("j-s0-r1"))
    found, here = table(book.readings({"j-s0-r0", "j-s0-r1"})), ("j", "0", "j-s0-r0", "a")
    assert found["dmsc_instance_sessions"] == {here: 3}
    assert found["dmsc_instance_cache_rows"] == {here: 100}
    assert found["dmsc_instance_cache_free_rows"] == {here: 40}
    assert found["dmsc_instance_wave_seconds"] == {here: 0.02}


def test_counters_add_up_over_samples_and_incarnations() -> None:
    book = InstanceSamples("a")
    link = LinkSample(
        peer="p",
        sent_bytes=100,
        transfers=2,
        transfer_ms=30.0,
        errors=1,
        figures=LinkFigures(latency_ms=5.0, loss=0.1),
    )
    book.take(sample(links=[link], microbatches=4))
    book.take(sample(links=[link], microbatches=7))
    book.take(sample(links=[link.model_copy(update={"figures": None})], microbatches=2, incarnation="i2"))
    found = table(book.readings({"j-s0-r0"}))
    here = ("j", "0", "j-s0-r0", "a")
    assert found["dmsc_instance_sent_bytes_total"] == {here: 300}
    assert found["dmsc_instance_transfer_seconds_total"][here] == pytest.approx(0.09)
    assert found["dmsc_instance_microbatches_total"] == {here: 9}
    assert "dmsc_link_latency_seconds" not in found  # the new incarnation has not measured it


def test_what_data_costs_adds_up_over_incarnations() -> None:
    book = InstanceSamples("a")
    data = DataFigures(stalled_s=2.5, read_bytes={"disk": 10, "store": 100})
    book.take(sample("j-data-r0", data=DataFigures(stalled_s=0.5, read_bytes={"store": 60})))
    book.take(sample("j-data-r0", data=data))
    book.take(sample("j-data-r0", incarnation="i2", data=DataFigures(stalled_s=1, read_bytes={"memory": 7})))
    book.take(sample("j-data-r1", data=DataFigures(read_bytes={"neighbour": 5})))
    book.take(sample("j-s0-r0"))
    found = table(book.readings({"j-data-r0", "j-data-r1", "j-s0-r0"}))
    here, there = ("j", "-1", "j-data-r0", "a"), ("j", "-1", "j-data-r1", "a")
    assert found["dmsc_instance_data_stall_seconds_total"] == {here: 3.5}
    assert found["dmsc_instance_data_bytes_total"] == {
        (*here, "disk"): 10,
        (*here, "store"): 100,
        (*here, "memory"): 7,
        (*there, "neighbour"): 5,
    }


def test_what_ended_has_no_series() -> None:
    book = InstanceSamples("a")
    book.take(sample())
    book.take(sample("k-s0-r0"))
    assert {labels[0] for labels in table(book.readings({"k-s0-r0"}))["dmsc_instance_busy_ratio"]} == {"k"}
    book.forget("k")
    assert table(book.readings({"k-s0-r0"})) == {}


def test_a_device_is_told_once_and_its_energy_shared_by_the_jobs_on_it() -> None:
    book = InstanceSamples("a", price_per_kwh=0.36)

    def device(joules: float) -> DeviceSample:
        return DeviceSample(device="cuda:0", power_w=300.0, energy_j=joules, xid_errors=())

    book.take(sample(device=device(1e6)))
    book.take(sample("k-s0-r0", device=device(1e6)))
    book.take(sample(device=device(1e6 + 2000)))  # since its last word: to both in equal parts
    book.take(sample("k-s0-r0", device=device(1e6 + 2000)))
    book.take(sample(device=device(50.0)))  # the driver was started again
    found = table(book.readings({"j-s0-r0", "k-s0-r0"}))
    assert found["dmsc_device_power_watts"] == {("a", "n", "cuda:0"): 300.0}
    assert found["dmsc_device_xid_errors_total"] == {("a", "n", "cuda:0"): 0}
    assert found["dmsc_job_energy_joules_total"] == {("j", "a"): 1000.0, ("k", "a"): 1000.0}
    assert (book.energy_j("j"), book.energy_j("other")) == (1000.0, None)
    assert found["dmsc_job_energy_cost_total"][("j", "a")] == pytest.approx(1000 / 3.6e6 * 0.36)
    assert "dmsc_device_temperature_celsius" not in found  # this driver does not tell it


def test_single_links_are_bounded_and_the_sums_are_not() -> None:
    book = InstanceSamples("a")
    for number in range(40):
        links = [
            LinkSample(peer=f"p{peer}", sent_bytes=1, figures=LinkFigures(latency_ms=1.0))
            for peer in range(64)
        ]
        book.take(sample(f"j-s0-r{number}", links=links))
    found = table(book.readings({f"j-s0-r{number}" for number in range(40)}))
    assert len(found["dmsc_link_latency_seconds"]) == 1_000
    assert sum(found["dmsc_instance_sent_bytes_total"].values()) == 40 * 64
