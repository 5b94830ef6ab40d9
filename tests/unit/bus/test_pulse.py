"""What counts as time in which the bus was heard."""

from __future__ import annotations

import pytest

from bus.pulse import BEAT_S, GAP_S, HeardTime
from entities.registry_core import LeaseConfig, RegistryCore
from tests.entity_records import instance


def beaten(heard: HeardTime, since: float, until: float) -> float:
    """Pulses come back in this time, each a beat after the one before; when the last one did."""
    now = since
    while now + BEAT_S <= until:
        now += BEAT_S
        heard.returned(now)
    return now


def test_it_goes_like_the_clock_while_pulses_come_back() -> None:
    heard = HeardTime(100.0)
    beaten(heard, 100.0, 130.0)
    assert heard.at(130.0) == pytest.approx(30.0)
    assert heard.silent(130.0) == 0.0


def test_a_standstill_counts_as_one_gap_however_long() -> None:
    for still_s in (2.0, 20.0, 20_000.0):
        heard = HeardTime(0.0)
        beaten(heard, 0.0, 10.0)
        assert heard.at(10.0 + still_s) == pytest.approx(10.0 + GAP_S)
        assert heard.silent(10.0 + still_s) == pytest.approx(still_s - GAP_S)
        heard.returned(10.0 + still_s)
        assert heard.at(10.0 + still_s) == pytest.approx(10.0 + GAP_S)
        beaten(heard, 10.0 + still_s, 15.0 + still_s)
        assert heard.at(15.0 + still_s) == pytest.approx(15.0 + GAP_S)


def test_it_never_goes_back_nor_faster_than_the_clock() -> None:
    heard, before, now = HeardTime(0.0), 0.0, 0.0
    for pause in (0.1, 3.0, 0.25, 1.0, 1.01, 60.0, 0.0, 0.25):
        half = heard.at(now + pause / 2)
        now += pause
        assert before <= half <= heard.at(now) <= before + pause
        before = heard.at(now)
        heard.returned(now)
        assert heard.at(now) == before


def test_time_in_which_nobody_listened_is_left_out() -> None:
    heard = HeardTime(0.0)
    beaten(heard, 0.0, 2.0)
    heard.resume(500.0)
    assert heard.at(500.0) == pytest.approx(2.0)
    assert heard.silent(500.0) == 0.0


def test_no_lease_runs_out_while_the_server_stands_still() -> None:
    """The registry's clock is heard time; by the wall's, all of them would be gone."""
    core, heard = RegistryCore(LeaseConfig()), HeardTime(0.0)
    core.register(instance("j-s0-r0"), heard.at(0.0))
    for tick in range(240):
        assert not core.tick(heard.at(0.5 * tick)), f"lost after {0.5 * tick} s of standstill"
    lost: frozenset[str] = frozenset()
    now = 120.0
    while not lost and now < 130.0:  # the server goes on, and nobody speaks
        now = beaten(heard, now, now + 0.5)
        lost = core.tick(heard.at(now))
    assert lost == {"j-s0-r0"}
