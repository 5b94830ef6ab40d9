"""Whose tables a sender goes by, while its cluster's router comes and goes (ADR-0058)."""

from __future__ import annotations

from tests.builders.routes import table
from workers.routing.table_choice import TableChoice


def test_tables_for_other_clusters_do_not_count() -> None:
    choice = TableChoice("a")
    assert choice.take(table(cluster="b"), 1) is None
    assert choice.serving == "a"


def test_a_guest_goes_by_the_table_of_the_router_that_serves_it() -> None:
    choice = TableChoice("new")
    theirs = table(cluster="b", guests=("new",))
    assert choice.take(table(cluster="a"), 1) is None
    assert choice.take(theirs, 2) is theirs
    assert choice.serving == "b"


def test_a_dead_router_s_table_gives_way_to_the_newer_one_of_who_serves_now() -> None:
    choice = TableChoice("b")
    own, theirs = table(cluster="b", revision=90), table(cluster="a", revision=3, guests=("b",))
    assert choice.take(own, 10) is own
    assert choice.take(theirs, 11) is theirs
    back = table(cluster="b", revision=91)
    assert choice.take(back, 12) is back
    assert choice.serving == "b"


def test_the_router_that_serves_no_longer_leaves_the_own_table() -> None:
    choice = TableChoice("b")
    own = table(cluster="b")
    choice.take(own, 10)
    choice.take(table(cluster="a", guests=("b",)), 11)
    assert choice.take(table(cluster="a"), 12) is own
    assert choice.take(table(cluster="a", revision=2), 13) is None
