"""What counts as time in which the bus was heard."""

from __future__ import annotations

import pytest

from bus.nats.dialer import ConnectionTimes
from bus.nats.liveness import OWN, HeardTime
from entities.service_registry.core import RegistrationLeaseConfig, RegistryCore
from tests.builders.records import instance


def beaten(heard: HeardTime, since: float, until: float) -> float:
    """Pulses come back in this time, each a beat after the one before; when the last one did."""
    now = since
    while now + ConnectionTimes.beat_s <= until:
        now += ConnectionTimes.beat_s
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
        assert heard.at(10.0 + still_s) == pytest.approx(10.0 + ConnectionTimes.gap_s)
        assert heard.silent(10.0 + still_s) == pytest.approx(still_s - ConnectionTimes.gap_s)
        heard.returned(10.0 + still_s)
        assert heard.at(10.0 + still_s) == pytest.approx(10.0 + ConnectionTimes.gap_s)
        beaten(heard, 10.0 + still_s, 15.0 + still_s)
        assert heard.at(15.0 + still_s) == pytest.approx(15.0 + ConnectionTimes.gap_s)


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
    core, heard = RegistryCore(RegistrationLeaseConfig()), HeardTime(0.0)
    core.register(instance("j-s0-r0"), heard.at(0.0))
    for tick in range(240):
        assert not core.tick(heard.at(0.5 * tick)), f"lost after {0.5 * tick} s of standstill"
    lost: frozenset[str] = frozenset()
    now = 120.0
    while not lost and now < 130.0:  # the server goes on, and nobody speaks
        now = beaten(heard, now, now + 0.5)
        lost = core.tick(heard.at(now))
    assert lost == {"j-s0-r0"}


# --- several servers -------------------------------------------------------------------------------------


def beaten_by(heard: HeardTime, servers: list[str], since: float, until: float) -> float:
    now = since
    while now + ConnectionTimes.beat_s <= until:
        now += ConnectionTimes.beat_s
        for server in servers:
            heard.returned(now, server)
    return now


def test_it_goes_while_all_servers_return_and_stands_while_any_does_not() -> None:
    for silent in (OWN, "b", "c"):
        heard = HeardTime(0.0)
        others = [server for server in (OWN, "b", "c") if server != silent]
        beaten_by(heard, [OWN, "b", "c"], 0.0, 10.0)
        assert heard.at(10.0) == pytest.approx(10.0)
        beaten_by(heard, others, 10.0, 30.0)
        assert heard.at(30.0) == pytest.approx(10.0 + ConnectionTimes.gap_s), silent
        assert heard.silent(30.0) == pytest.approx(20.0 - ConnectionTimes.gap_s)
        heard.returned(30.0, silent)
        assert heard.at(30.0) == pytest.approx(10.0 + ConnectionTimes.gap_s)
        beaten_by(heard, [OWN, "b", "c"], 30.0, 35.0)
        assert heard.at(35.0) == pytest.approx(15.0 + ConnectionTimes.gap_s)


def test_a_server_counts_from_its_first_return_until_it_has_left() -> None:
    heard = HeardTime(0.0)
    beaten_by(heard, [OWN], 0.0, 10.0)  # b is known, and was never heard
    assert heard.at(10.0) == pytest.approx(10.0)
    beaten_by(heard, [OWN, "b"], 10.0, 20.0)
    beaten_by(heard, [OWN], 20.0, 65.0)
    assert heard.at(65.0) == pytest.approx(20.0 + ConnectionTimes.gap_s)
    heard.left(65.0, "b")
    assert heard.silent(65.0) == 0.0
    beaten_by(heard, [OWN], 65.0, 75.0)
    assert heard.at(75.0) == pytest.approx(30.0 + ConnectionTimes.gap_s)
    heard.returned(75.0, "b")  # it is back, and counts again
    beaten_by(heard, [OWN], 75.0, 95.0)
    assert heard.at(95.0) == pytest.approx(30.0 + 2 * ConnectionTimes.gap_s)


def test_it_never_goes_back_nor_faster_than_the_clock_with_several_servers() -> None:
    heard, before, now = HeardTime(0.0), 0.0, 0.0
    for number in range(500):
        pause = (0.1, 3.0, 0.25, 1.0, 7.5, 0.0, 0.4)[number % 7]
        now += pause
        assert before <= heard.at(now) <= before + pause + 1e-9
        before = heard.at(now)
        server = (OWN, "b", "c")[number * number % 3]
        if number % 11 == 3 and server != OWN:
            heard.left(now, server)
        else:
            heard.returned(now, server)
        assert heard.at(now) == pytest.approx(before)
