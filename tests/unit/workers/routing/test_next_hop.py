"""Late binding: weights, windows, fences, and what instances and routers say of their speed."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from schemas.data_plane import HopLoad
from schemas.step import Member
from tests.builders.routes import entry, table
from workers.routing.next_hop import Binder


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def load(service_ms: float, open: int = 0) -> HopLoad:
    return HopLoad(open=open, service_ms=service_ms)


def bind(binder: Binder, count: int, **more: int) -> list[str]:
    """The next `count` choices."""
    return [member.sid for member in (binder.bind(1, **more) for _ in range(count)) if member]


def talked_to(binder: Binder, *sids: str) -> Binder:
    """After one microbatch to each: an instance tells how it is when it is offered something."""
    assert sorted(bind(binder, len(sids))) == sorted(sids)
    for sid in sids:
        binder.returned(sid)
    return binder


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize(
    ("senders", "candidates", "each"), [(3, 3, 2), (2, 3, 3), (4, 3, 3), (3, 5, 5), (2, 2, 4)]
)
def test_senders_that_hear_nothing_of_one_another_use_equals_equally_often(
    senders: int, candidates: int, each: int, steps: int
) -> None:
    """Each binds its first microbatch at once, and its later ones before any has come back."""
    names = [f"r{number}" for number in range(candidates)]
    count = senders * each
    binders = [Binder("a", place=place, microbatches=count, clock=Clock()) for place in range(senders)]
    for binder in binders:
        binder.update(table(*(entry(name, window=9, service_ms=10) for name in names)))
    for step in range(steps):
        chosen: Counter[str] = Counter()
        for turn in range(each):
            at_once: Counter[str] = Counter()
            for place, binder in enumerate(binders):
                at_once.update(bind(binder, 1, microbatch=turn * senders + place))
            assert max(at_once.values()) == -(-senders // candidates)
            chosen += at_once
        assert max(chosen.values()) == -(-count // candidates)
        for binder in binders:
            for name in names:
                for _ in range(each):
                    binder.returned(name, load(10.0))
            binder.next_step(step + 1)


def test_a_lone_sender_with_few_microbatches_uses_all_equals_within_some_steps() -> None:
    binder = Binder("a", microbatches=2, clock=Clock())
    binder.update(table(*(entry(f"r{number}", window=9, service_ms=10) for number in range(8))))
    chosen: Counter[str] = Counter()
    for step in range(4):
        for microbatch in range(2):
            (sid,) = bind(binder, 1, microbatch=microbatch)
            chosen[sid] += 1
            binder.returned(sid)
        binder.next_step(step + 1)
    assert set(chosen.values()) == {1}
    assert len(chosen) == 8


def test_a_standby_and_a_full_window_are_never_chosen() -> None:
    binder = Binder("a")
    binder.update(table(entry("standby", weight=0.0), entry("only", window=1)))
    assert bind(binder, 3) == ["only"]


def test_equals_in_a_cluster_are_taken_in_turn_and_senders_begin_at_different_ones() -> None:
    first: set[str] = set()
    for place in range(4):
        binder = Binder("a", place=place, clock=Clock())
        binder.update(table(*(entry(f"r{number}", window=9) for number in range(4))))
        chosen = bind(binder, 12)
        assert set(Counter(chosen).values()) == {3}
        assert chosen[:4] == chosen[4:8]
        first.add(chosen[0])
    assert len(first) > 2


def test_the_own_cluster_comes_first_between_equals() -> None:
    binder = Binder("a", clock=Clock())
    binder.update(table(entry("far", cluster="b"), entry("near", cluster="a")))
    assert bind(binder, 4) == ["near", "far", "near", "far"]
    binder.returned("near")
    binder.returned("far")
    assert bind(binder, 1) == ["near"]


def test_who_is_free_first_is_chosen() -> None:
    clock = Clock()
    binder = Binder("a", clock=clock)
    binder.update(table(entry("fast", window=9, service_ms=10), entry("slow", window=9, service_ms=40)))
    assert bind(binder, 5) == ["fast", "slow", "fast", "fast", "fast"]
    clock.now = 0.04
    assert bind(binder, 1) == ["fast"], "both are free: the fast one"


def test_near_the_end_of_a_step_a_slow_one_is_left_out() -> None:
    binder = Binder("a", microbatches=100, clock=Clock())
    binder.update(table(entry("fast", service_ms=10), entry("slow", service_ms=40)))
    assert binder.bind(1, 10) == Member(sid="fast", incarnation="i")
    assert binder.bind(1, 11) == Member(sid="slow", incarnation="i"), "there is much left to do"
    binder.returned("slow")
    assert binder.bind(1, 98) == Member(sid="fast", incarnation="i")
    assert binder.bind(1, 99) is None, "the fast one's window is full, and it is done sooner all the same"
    binder.returned("fast")
    assert binder.bind(1, 99) == Member(sid="fast", incarnation="i")


def test_nobody_is_waited_for_at_the_end_who_owes_nothing() -> None:
    binder = Binder("a", microbatches=4, clock=Clock())
    binder.update(table(entry("fast", weight=0.0, service_ms=10), entry("slow", service_ms=40)))
    assert binder.bind(1, 3) == Member(sid="slow", incarnation="i")


def test_one_that_is_late_is_not_waited_for_for_ever() -> None:
    clock = Clock()
    binder = Binder("a", microbatches=4, clock=clock)
    binder.update(table(entry("stuck", service_ms=10, window=1), entry("slow", service_ms=40)))
    assert binder.bind(1, 3) == Member(sid="stuck", incarnation="i")
    assert binder.bind(1, 3) is None
    clock.now = 0.05
    assert binder.bind(1, 3) == Member(sid="slow", incarnation="i")


def test_what_a_receiver_says_in_passing_counts_at_once() -> None:
    binder = Binder("a", clock=Clock())
    binder.update(table(entry("a1", window=9), entry("a2", window=9)))
    talked_to(binder, "a1", "a2")
    binder.load_reported(Member(sid="a1", incarnation="i"), load(10.0, open=6))
    binder.load_reported(Member(sid="a2", incarnation="i"), load(10.0))
    assert bind(binder, 4) == ["a2"] * 4, "others keep a1 busy"
    binder.returned("a2", load(80.0, open=3))
    assert bind(binder, 2) == ["a1", "a1"], "a2 has become slow"


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -5.0, 1e12, 0.0])
def test_an_absurd_report_changes_nothing(absurd: float) -> None:
    binder = Binder("a", clock=Clock())
    binder.update(table(entry("a1", window=9, service_ms=10), entry("a2", window=9, service_ms=10)))
    for sid in ("a1", "a2"):
        binder.load_reported(Member(sid=sid, incarnation="i"), load(10.0))
    talked_to(binder, "a1", "a2")
    binder.load_reported(Member(sid="a1", incarnation="i"), load(absurd, open=-7))
    assert Counter(bind(binder, 8)) == {"a1": 4, "a2": 4}


def test_a_report_of_another_incarnation_is_not_ours() -> None:
    binder = Binder("a", clock=Clock())
    binder.update(table(entry("a1", window=9), entry("a2", window=9)))
    talked_to(binder, "a1", "a2")
    binder.load_reported(Member(sid="a1", incarnation="old"), load(10.0, open=50))
    assert Counter(bind(binder, 8)) == {"a1": 4, "a2": 4}


def test_the_algorithm_is_the_tables_and_one_that_fails_changes_nothing() -> None:
    binder = Binder("a", clock=Clock())
    slow, fast = entry("a1", window=2, service_ms=99), entry("a2", window=2, service_ms=10)
    binder.update(table(slow, fast, algorithm="round-robin"))
    assert bind(binder, 4) == ["a1", "a2", "a1", "a2"]
    for sid in ("a1", "a1", "a2", "a2"):
        binder.returned(sid)
    binder.update(table(slow, fast, algorithm="no_such_module:at_all", revision=2))
    assert bind(binder, 2) == ["a1", "a2"]
    binder.update(table(slow, fast, algorithm="least-outstanding", revision=3))
    assert Counter(bind(binder, 2)) == {"a1": 1, "a2": 1}


def test_windows_push_back_until_something_returns() -> None:
    binder = Binder("a")
    binder.update(table(entry("one", window=1)))
    assert binder.bind(1) == Member(sid="one", incarnation="i")
    assert binder.bind(1) is None
    binder.returned("one")
    assert binder.bind(1) is not None


def test_a_fenced_incarnation_is_out_even_if_the_table_still_names_it() -> None:
    binder = Binder("a")
    binder.update(table(entry("one")))
    binder.fence(Member(sid="one", incarnation="i"))
    assert binder.bind(1) is None
    binder.update(table(entry("one", incarnation="next"), revision=2))
    assert binder.bind(1) == Member(sid="one", incarnation="next")


def test_an_older_table_of_the_same_router_is_ignored() -> None:
    binder = Binder("a")
    binder.update(table(entry("new"), revision=5))
    binder.update(table(entry("old"), revision=4))
    assert binder.bind(1) == Member(sid="new", incarnation="i")
    binder.update(table(entry("other"), revision=1, router="router-b"))
    assert binder.bind(1) == Member(sid="other", incarnation="i")


def test_a_rate_admits_evenly_and_an_idle_time_earns_one_at_most() -> None:
    clock = Clock()
    binder = Binder("a", clock=clock)
    binder.update(table(entry("r", window=99), admitted_per_s=4.0))
    sent_at = []
    for tick in range(200):
        clock.now = tick / 20
        sent_at += [clock.now] * len(bind(binder, 9))
        assert 0 < binder.pause_s(1) <= 0.25
    assert len(sent_at) == 40
    clock.now = 100.0
    assert binder.pause_s(1) == 0
    assert len(bind(binder, 9)) == 2
    binder.update(table(entry("r", window=99), admitted_per_s=8.0, revision=2))
    assert binder.pause_s(1) == pytest.approx(0.125), "a higher rate holds at once"
    binder.update(table(entry("r", window=99), admitted_per_s=1.0, revision=3))
    assert binder.pause_s(1) == pytest.approx(0.125), "what is due stays due"
    binder.update(table(entry("r", window=99), revision=4))
    assert binder.pause_s(1) == 0
    assert len(bind(binder, 9)) == 9
