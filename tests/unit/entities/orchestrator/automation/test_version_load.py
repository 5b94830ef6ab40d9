"""How many replicas a version needs: room decides, and neither a burst nor a lull swings it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entities.orchestrator.automation.served_load import ServedLoad
from entities.orchestrator.automation.version_load import (
    ScaleDecision,
    ScaleMemory,
    VersionLoad,
    decide,
    need,
)
from schemas.job_file.parallel import ReplicaRange
from schemas.serve_spec import ScaleSpec, ServeSpec
from schemas.services.figures import ServiceFigures, VersionFigures
from schemas.telemetry import SessionLoad

RANGE = ReplicaRange(min=1, want=1, max=4)
RULES = ScaleSpec(fill=0.5, up_s=3, down_s=60, idle_s=300)
BUSY = VersionLoad(sessions=20, room=10, tokens_per_s=80.0)


class Watched:
    """A version that is looked at again and again."""

    def __init__(self, within: ReplicaRange = RANGE, rules: ScaleSpec = RULES, replicas: int = 1) -> None:
        self.within, self.rules, self.replicas = within, rules, replicas
        self.memory = ScaleMemory(begun_at=0.0)

    def look(self, load: VersionLoad, now: float) -> ScaleDecision | None:
        decision, self.memory = decide(load, self.replicas, self.within, self.rules, self.memory, now)
        if decision is not None:
            self.replicas = decision.replicas
        return decision


@pytest.mark.parametrize(
    ("load", "needed", "why"),
    [
        (VersionLoad(sessions=7, room=10), 1.4, "7 sessions, of 10 per replica"),
        (
            VersionLoad(sessions=10, refused=4, room=10),
            2.8,
            "10 sessions and 4 refused for want of room, of 10 per replica",
        ),
        (VersionLoad(sessions=1, room=10, used=0.9), 3.6, "90% of the cache in use"),
        (VersionLoad(sessions=8, room=100, token_ms=75.0), 3.0, "75 ms from token to token, of 50"),
        (VersionLoad(sessions=2, room=100, token_ms=900.0), 2.0, "900 ms from token to token, of 50"),
        (replace(BUSY, room=40), 1.0, "20 sessions, of 40 per replica; 40 tokens/s per replica"),
    ],
)
def test_what_is_short_decides(load: VersionLoad, needed: float, why: str) -> None:
    found = need(load, 2, RULES.model_copy(update={"token_ms": 50.0}))
    assert found == (pytest.approx(needed), why)


def test_more_replicas_come_once_they_were_needed_for_a_while() -> None:
    version = Watched()
    assert version.look(BUSY, 10.0) is None
    assert version.look(VersionLoad(sessions=1, room=10), 11.0) is None, "a burst is over"
    assert version.look(BUSY, 12.0) is None
    assert version.look(BUSY, 14.9) is None
    grown = version.look(BUSY, 15.0)
    assert grown == ScaleDecision(4, "20 sessions, of 10 per replica; 80 tokens/s per replica")
    assert version.look(replace(BUSY, sessions=90), 30.0) is None, "never more than max"


def test_fewer_replicas_are_those_that_were_needed_at_most_in_a_minute() -> None:
    version = Watched(replicas=4)
    light = VersionLoad(sessions=2, room=10)
    assert version.look(light, 0.0) is None
    assert version.look(VersionLoad(sessions=8, room=10), 30.0) is None
    assert version.look(light, 59.0) is None
    less = version.look(light, 60.0)
    assert less is not None
    assert (less.replicas, less.reason) == (
        2,
        "no more than 2 needed for 60 s: 2 sessions, of 10 per replica",
    )
    assert version.look(light, 61.0) is None
    assert version.look(VersionLoad(sessions=9, room=10), 100.0) is None, "two are needed: it begins anew"
    assert version.look(light, 121.5) is None
    assert version.look(light, 181.5) == ScaleDecision(
        1, "no more than 1 needed for 60 s: 2 sessions, of 10 per replica"
    )
    assert version.look(VersionLoad(room=10), 9_999.0) is None, "min is 1: it stays"


def test_all_slots_are_given_back_after_an_idle_time_where_the_file_says_so() -> None:
    version = Watched(ReplicaRange(min=0, want=1, max=2), RULES)
    asked = VersionLoad(room=10, asked_at=100.0)
    assert version.look(VersionLoad(room=10), 299.0) is None, "it has just started"
    assert version.look(replace(asked, sessions=1), 399.0) is None, "an answer is under way"
    assert version.look(asked, 399.0) is None
    assert version.look(asked, 400.0) == ScaleDecision(0, "nobody has asked it for 300 s")


def told(gateway: str, since: float = 1.0, /, **figures: object) -> ServiceFigures:
    fields = {"service": "s", "version": "v", "job": "j", **figures}
    return ServiceFigures(gateway=gateway, since=since, versions=(VersionFigures.model_validate(fields),))


def test_what_gateways_say_is_put_together() -> None:
    load, serve = ServedLoad(), ServeSpec(service="s", sessions=8, batch=32)
    stages = {"j-s0-r0": 0, "j-s1-r0": 1, "j-s1-r1": 1}
    assert load.of("j", stages, serve, 0.0) == VersionLoad(room=8)
    half = SessionLoad(rows=100, free_rows=50, wave_ms=10.0)
    load.take(told("a", sessions=3, tokens=10, requests={"ok": 1}, loads={"j-s0-r0": half}), 100.0)
    load.take(told("b", sessions=2, refused=1), 100.5)
    full = SessionLoad(rows=100, free_rows=10, wave_ms=20.0)
    loads = {"j-s0-r0": half, "j-s1-r0": half, "j-s1-r1": full, "j-s9-r9": half}
    load.take(told("a", sessions=4, tokens=50, requests={"ok": 3}, refused=2, loads=loads), 102.0)
    found = load.of("j", stages, serve, 103.0)
    assert (found.sessions, found.refused, found.room, found.asked_at) == (6, 2, 8, 103.0)
    assert (found.used, found.token_ms, found.tokens_per_s) == (pytest.approx(0.7), 25.0, 20.0)
    # The refused have asked again since, or given up; and gateway b, of which nothing was heard, was killed.
    load.take(told("a", sessions=4, tokens=50, requests={"ok": 3}, refused=2), 130.0)
    found = load.of("j", stages, serve, 140.0)
    assert (found.sessions, found.refused) == (4, 0)
    # Of instances it says no load that is fresh: what they said before does not count any more.
    assert (found.used, found.token_ms) == (0.0, 0.0)
    # A gateway that began anew counts from nothing.
    load.take(told("a", 2.0, requests={"ok": 1}), 150.0)
    found = load.of("j", stages, serve, 160.0)
    assert (found.sessions, found.tokens_per_s, found.asked_at) == (0, 0.0, 150.0)
    load.forget(["j"])
    assert load.jobs == ()


def test_a_gateway_that_died_holds_neither_sessions_nor_loads() -> None:
    load, serve = ServedLoad(unheard_s=15.0), ServeSpec(service="s", sessions=8)
    full = SessionLoad(rows=100, free_rows=0, wave_ms=20.0)
    load.take(told("a", sessions=8, loads={"j-s0-r0": full}), 100.0)
    found = load.of("j", {"j-s0-r0": 0}, serve, 115.0)
    assert (found.sessions, found.used, found.token_ms, found.asked_at) == (8, 1.0, 20.0, 115.0)
    found = load.of("j", {"j-s0-r0": 0}, serve, 115.1)
    assert (found.sessions, found.used, found.token_ms, found.asked_at) == (0, 0.0, 0.0, 115.0)


def test_of_two_gateways_that_speak_of_an_instance_the_later_one_counts() -> None:
    load, serve = ServedLoad(), ServeSpec(service="s", sessions=8)
    full, free = SessionLoad(rows=100, free_rows=0), SessionLoad(rows=100, free_rows=100)
    load.take(told("b", sessions=1, loads={"j-s0-r0": full}), 100.0)
    load.take(told("a", sessions=1, loads={"j-s0-r0": free}), 101.0)
    assert load.of("j", {"j-s0-r0": 0}, serve, 102.0).used == 0.0


def test_single_passes_fill_batches() -> None:
    load, serve = ServedLoad(), ServeSpec(service="s", sessions=8, batch=32)
    load.take(told("a", sessions=40, loads={"j-s0-r0": SessionLoad(most_sessions=8)}), 1.0)
    found = load.of("j", {"j-s0-r0": 0}, serve, 1.0)
    assert (found.sessions, found.room, found.used) == (40, 32, 0.0)
