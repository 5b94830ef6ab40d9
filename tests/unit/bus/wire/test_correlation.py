"""Origins of messages: what a task sends names what it handles; correlations and W3C trace contexts."""

from __future__ import annotations

import asyncio

import pytest

from bus.wire import codec, correlation
from bus.wire.codec import decode, encode
from bus.wire.correlation import (
    Origin,
    correlate,
    correlated,
    handling,
    parse_traceparent,
    stand_alone,
    trace_id,
)
from bus.wire.packed import pack
from schemas.envelope import EntityKind, Envelope, Sender
from schemas.errors import Ack, BadMessage

SENDER = codec.sender_map(Sender(name="a", kind=EntityKind.CLIENT, incarnation="i1"))
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def sent(causation: str | None = None) -> Envelope:
    return decode(encode(Ack(), SENDER, "i1-1", causation))[1]


async def test_what_a_task_sends_names_what_it_handles_and_so_do_the_tasks_that_it_starts() -> None:
    async def service() -> list[Envelope]:
        handling.set(Origin("i9-4", "c1"))
        later = asyncio.create_task(asyncio.to_thread(sent))
        return [sent(), sent("i9-5"), await later]

    own, named, later = await asyncio.create_task(service())
    assert (own.causation, own.correlation) == ("i9-4", "c1")
    assert (named.causation, named.correlation) == ("i9-5", "c1")
    assert (later.causation, later.correlation) == ("i9-4", "c1")
    assert (sent().causation, sent().correlation) == (None, None)


def test_nothing_is_added_to_the_wire_where_nothing_is_known() -> None:
    plain = encode(Ack(), SENDER, "i1-1")
    assert b"correlation" not in plain
    with correlated("c1"):
        assert len(encode(Ack(), SENDER, "i1-1")) == len(plain) + len("correlation") + len("c1") + 2
        assert decode(encode(pack(Ack()), SENDER, "i1-1"))[1].correlation == "c1"


async def test_a_block_a_task_and_a_loop_of_its_own() -> None:
    async def work() -> list[tuple[str | None, str | None]]:
        correlate("c2", cause="i9-6")
        first = sent()
        stand_alone()
        last = sent()
        return [(first.causation, first.correlation), (last.causation, last.correlation)]

    with correlated(span=SPAN) as name:
        assert correlation.current() == name == sent().correlation
        assert correlation.caller_span() == SPAN
        assert await asyncio.create_task(work()) == [("i9-6", "c2"), (None, None)]
        assert correlation.current() == name
    assert correlation.current() is None
    assert correlation.current_cause() is None


def test_a_correlation_is_bounded_where_it_is_read() -> None:
    with correlated("c" * 65), pytest.raises(BadMessage, match="correlation"):
        sent()


@pytest.mark.parametrize(
    ("header", "parsed"),
    [
        (f"00-{TRACE}-{SPAN}-01", (TRACE, SPAN)),
        (f"01-{TRACE}-{SPAN}-01-more", (TRACE, SPAN)),  # a later version may say more
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_traceparent(header: str, parsed: tuple[str, str] | None) -> None:
    assert parse_traceparent(header) == parsed


def test_a_trace_id_is_its_own_correlation_and_others_have_one() -> None:
    assert trace_id(TRACE) == TRACE
    made = trace_id("8c1f0a2e77d1")
    assert made == trace_id("8c1f0a2e77d1") != trace_id("8c1f0a2e77d2")
    assert len(made) == 32


@pytest.mark.parametrize(("text", "fits"), [("a-Z_9", True), ("", False), ("a b", False), ("a" * 65, False)])
def test_what_a_caller_may_give(text: str, fits: bool) -> None:
    assert correlation.is_correlation(text) is fits
