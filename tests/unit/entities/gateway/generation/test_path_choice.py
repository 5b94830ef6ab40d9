"""Whether instances have room for requests that come last."""

from __future__ import annotations

from entities.gateway.generation.path_choice import KnownLoad, has_room
from schemas.step import Member
from schemas.telemetry import SessionLoad

ONE = Member(sid="one", incarnation="i")
TWO = Member(sid="two", incarnation="i")


def said(sessions: int, own: int = 0, at: float = 100.0, free_rows: int = 1000) -> KnownLoad:
    load = SessionLoad(sessions=sessions, most_sessions=8, rows=1000, free_rows=free_rows)
    return KnownLoad(load, own, at)


def room(*loads: KnownLoad, mine: int = 0) -> bool:
    members = (ONE, TWO)[: len(loads)]
    known = dict(zip(("one", "two"), loads, strict=False))
    return has_room([members], known, 0.5, mine, since=90.0)


def test_there_is_room_below_the_share_of_sessions_and_of_rows() -> None:
    assert has_room([[ONE]], {}, 0.5, 0, since=90.0)
    assert room(said(3))
    assert not room(said(4))
    assert not room(said(0, own=4))
    assert not room(said(1, free_rows=500))
    assert room(said(8), said(3))
    assert not room(said(0), mine=4)


def test_what_was_said_too_long_ago_takes_no_room_but_own_sessions_do() -> None:
    """They were of a gateway that is gone; nobody said when they ended."""
    assert room(said(8, at=80.0, free_rows=0))
    assert not room(said(0, own=4, at=80.0))
