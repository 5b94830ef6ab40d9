"""Time in which somebody waits counts once, however many wait."""

from __future__ import annotations

from workers.telemetry.stall_clock import StallClock


def test_waits_that_overlap_count_once_and_those_under_way_count() -> None:
    now = 100.0
    stall = StallClock(lambda: now)
    assert stall.seconds == 0.0
    with stall.waiting():
        now += 1.0
        with stall.waiting():
            now += 2.0
            assert stall.seconds == 3.0
        now += 4.0
    now += 50.0
    assert stall.seconds == 7.0
    try:
        with stall.waiting():
            now += 1.0
            raise LookupError
    except LookupError:
        pass
    now += 50.0
    assert stall.seconds == 8.0
