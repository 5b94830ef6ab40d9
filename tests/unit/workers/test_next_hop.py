"""Late binding: weights, windows, fences."""

from __future__ import annotations

from collections import Counter

from schemas.data_plane import RouteEntry, RouteTable
from schemas.step import Member
from workers.next_hop import Binder, choose


def entry(
    sid: str, weight: float = 1.0, window: int = 2, cluster: str = "a", incarnation: str = "i"
) -> RouteEntry:
    return RouteEntry(sid=sid, incarnation=incarnation, cluster=cluster, weight=weight, window=window)


def table(*entries: RouteEntry, revision: int = 1, router: str = "router-a") -> RouteTable:
    return RouteTable(job="j", cluster="a", stage=1, revision=revision, router=router, entries=entries)


def test_least_outstanding_by_weight() -> None:
    entries = [entry("fast", 3.0), entry("slow", 1.0)]
    chosen = choose(entries, {"fast": 1, "slow": 0}, {}, "a")
    assert chosen is not None
    assert chosen.sid == "fast"


def test_a_standby_and_a_full_window_are_never_chosen() -> None:
    assert choose([entry("standby", 0.0)], {}, {}, "a") is None
    assert choose([entry("full", window=1)], {"full": 1}, {}, "a") is None


def test_equals_share_equally_and_the_own_cluster_comes_first() -> None:
    binder = Binder("a")
    binder.update(table(entry("far", cluster="b"), entry("near", cluster="a")))
    chosen = []
    for _ in range(10):
        member = binder.bind(1)
        assert member is not None
        chosen.append(member.sid)
        binder.returned(member.sid)
    assert chosen[0] == "near"
    assert Counter(chosen) == {"near": 5, "far": 5}


def test_open_microbatches_follow_the_weights() -> None:
    binder = Binder("a")
    binder.update(table(entry("fast", 3.0, window=9), entry("slow", 1.0, window=9)))
    chosen = Counter(member.sid for member in (binder.bind(1) for _ in range(8)) if member)
    assert chosen == {"fast": 6, "slow": 2}


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
