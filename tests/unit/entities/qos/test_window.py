"""Type 5 upward: aggregates of one cluster (draft §4.3, §4.4(3))."""

from __future__ import annotations

import pytest

from entities.qos.window import QosWindow
from schemas.signals import QosReport
from schemas.telemetry import DeviceSample, LinkSample
from tests.builders.telemetry import linked_sample as sample


def report(window: QosWindow, *, window_s: float = 2.0, lost: int = 0) -> QosReport:
    return window.report("j", sid="router-east", cluster="east", window_s=window_s, instances=2, lost=lost)


def test_links_add_up() -> None:
    window = QosWindow()
    window.add_sample(sample("j-s0-r0"))
    window.add_sample(
        sample(
            "j-s0-r0", links=(LinkSample(peer="x", sent_bytes=2_000, transfers=2, transfer_ms=16, errors=3),)
        )
    )
    told = report(window)
    assert told.throughput_bytes_per_s == 6_000
    assert told.latency_ms == 3.0
    assert told.error_rate == pytest.approx(3 / 15)
    assert told.bandwidth_bytes_per_s == pytest.approx(12_000 / 0.036)
    assert (told.instances, told.job, told.window_s) == (2, "j", 2.0)


def test_tokens_are_those_of_the_fastest_stage() -> None:
    window = QosWindow()
    for sid, rate in (("j-s0-r0", 10.0), ("j-s0-r0", 100.0), ("j-s0-r1", 50.0), ("j-s1-r0", 140.0)):
        window.add_sample(sample(sid, tokens_per_s=rate))
    assert report(window).throughput_tokens_per_s == 150.0


def test_each_window_starts_anew_and_a_silent_one_is_all_zero() -> None:
    window = QosWindow()
    window.add_sample(sample())
    report(window)
    told = report(window)
    assert (told.throughput_bytes_per_s, told.latency_ms, told.error_rate, told.loss_rate) == (0, 0, 0, 0)


def test_failed_calls_are_errors_and_their_time_the_latency_where_no_transfer_was_seen() -> None:
    window = QosWindow()
    window.add_call("j", 10.0, failed=False)
    window.add_call("j", 30.0, failed=True)
    told = report(window)
    assert (told.latency_ms, told.error_rate) == (20.0, 0.5)


def test_messages_that_our_queues_dropped_are_the_loss() -> None:
    window = QosWindow()
    for _ in range(6):
        window.add_microbatch("j")
    assert report(window, lost=2).loss_rate == 0.25


def test_totals_for_the_termination_report() -> None:
    window = QosWindow()
    window.add_sample(sample())
    report(window)
    window.add_sample(sample())
    window.add_microbatch("j")
    assert window.forget("j") == (1, 20_000)
    assert window.forget("j") == (0, 0)


def test_the_hottest_device_and_the_memory_errors_since_the_job_began() -> None:
    window = QosWindow()
    window.add_sample(sample("j-s0-r0"))
    assert (report(window).temperature_c, report(window).ecc_errors) == (None, None)

    def heard(sid: str, device: str, temperature_c: float, errors: int) -> None:
        told = DeviceSample(device=device, temperature_c=temperature_c, ecc_errors=errors)
        window.add_sample(sample(sid, device=told))

    heard("j-s0-r0", "cuda:0", 60.0, 7)
    heard("j-s0-r1", "cuda:0", 61.0, 7)
    heard("j-s1-r0", "cuda:1", 50.0, 0)
    first = report(window)
    assert (first.temperature_c, first.ecc_errors) == (61.0, 0)
    heard("j-s0-r0", "cuda:0", 55.0, 9)
    second = report(window)
    assert (second.temperature_c, second.ecc_errors) == (55.0, 2)
    window.forget("j")
    assert report(window).ecc_errors is None
