"""The gateway's pure parts under load: pages, rates, breakers, budgets, keys, feeds of events."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entities.gateway.http.admission.early_refusal import is_plain
from entities.gateway.http.admission.listener import bind
from entities.gateway.http.admission.load import TURN, AdmissionQueue, HttpLoad
from entities.gateway.http.paging import cut, decode_cursor, encode_cursor
from entities.gateway.http.rate_limit import Buckets, RequestRate
from entities.gateway.http.sse.format import EventLine, EventsConfig
from entities.gateway.http.sse.hub import PIECE_BYTES, SubjectHub
from entities.gateway.operations.breaker import Breaker, BreakerConfig, BreakerState, RetryBudget
from entities.gateway.operations.idempotency import key_token, next_step, request_digest
from schemas.errors import BadInput
from schemas.gateway_api import KeptAnswer
from schemas.registry import InstanceState
from tests.builders.records import service

# --- pages --------------------------------------------------------------------------------------------------


@given(st.sets(st.tuples(st.floats(0, 1e9), st.text(max_size=5))), st.integers(1, 7), st.booleans())
def test_pages_have_every_item_once_and_in_order(
    items: set[tuple[float, str]], limit: int, descending: bool
) -> None:
    found: list[tuple[float, str]] = []
    cursor: str | None = None
    while True:
        page, cursor = cut(items, lambda one: one, limit, cursor, descending=descending)
        assert len(page) <= limit
        found += page
        if cursor is None:
            break
    assert found == sorted(items, reverse=descending)


def test_what_is_added_or_removed_meanwhile_moves_no_page() -> None:
    first, cursor = cut(["b", "d", "f"], lambda one: (one,), 2, None)
    assert first == ("b", "d")
    assert cut(["a", "f", "g"], lambda one: (one,), 2, cursor) == (("f", "g"), None)


@pytest.mark.parametrize("cursor", ["", "x", "e30", "W10", "W251bGxd", "ä", encode_cursor((1, "x")) + "!"])
def test_a_cursor_that_no_list_gave(cursor: str) -> None:
    with pytest.raises(BadInput, match="cursor: not one that this list gave"):
        decode_cursor(cursor)


def test_a_cursor_of_another_list() -> None:
    with pytest.raises(BadInput, match="cursor"):
        cut(["a"], lambda one: (one,), 1, encode_cursor((1.0, "x")))


# --- rates --------------------------------------------------------------------------------------------------


def test_a_burst_then_the_rate() -> None:
    buckets = Buckets(RequestRate(per_s=10, burst=3))
    assert [buckets.take("ann", 0.0).allowed for _ in range(4)] == [True, True, True, False]
    refused = buckets.take("ann", 0.0)
    assert refused.retry_s == pytest.approx(0.1)
    assert dict(refused.headers())[b"retry-after"] == b"1"
    assert buckets.take("bob", 0.0).allowed, "one's own bucket"
    assert buckets.take("ann", 0.11).allowed
    assert not buckets.take("ann", 0.11).allowed
    assert dict(buckets.take("ann", 60.0).headers()) == {
        b"ratelimit-limit": b"3",
        b"ratelimit-remaining": b"2",
        b"ratelimit-reset": b"1",
    }


@given(st.lists(st.floats(0, 2), max_size=200))
def test_no_more_than_the_rate_and_a_burst(gaps: list[float]) -> None:
    buckets, now, allowed = Buckets(RequestRate(per_s=2, burst=5)), 0.0, 0
    for gap in gaps:
        now += gap
        allowed += buckets.take("ann", now).allowed
    assert allowed <= 5 + 2 * now + 1e-6


def test_identities_are_bounded() -> None:
    buckets = Buckets(RequestRate(per_s=1, burst=1), most=3)
    for number in range(10):
        buckets.take(str(number), 0.0)
    assert len(buckets) == 3


# --- breakers -----------------------------------------------------------------------------------------------


def test_a_breaker_opens_probes_and_closes() -> None:
    breaker = Breaker(BreakerConfig(failures=3, open_s=1.0, longest_open_s=3.0))
    for _ in range(3):
        assert breaker.admit(0.0) is None
        breaker.record(False, 0.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.admit(0.4) == pytest.approx(0.6)
    assert breaker.admit(1.0) is None, "one probe"
    assert breaker.admit(1.0) is not None, "and only one"
    breaker.record(False, 1.0)
    assert breaker.admit(2.9) == pytest.approx(0.1), "twice as long"
    assert breaker.admit(3.0) is None
    breaker.record(True, 3.0)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.opened == 2


def test_a_breaker_stays_closed_while_most_calls_succeed_or_failures_are_old() -> None:
    breaker = Breaker(BreakerConfig(failures=3, window_s=10))
    for number in range(30):
        breaker.record(number % 3 != 0, 0.1 * number)
    assert breaker.state is BreakerState.CLOSED
    breaker = Breaker(BreakerConfig(failures=3, window_s=10))
    for number in range(9):
        breaker.record(False, 6.0 * number)
    assert breaker.state is BreakerState.CLOSED


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 6.0)), max_size=60))
def test_a_breaker_opens_just_when_the_calls_of_its_window_say_so(outcomes: list[tuple[bool, float]]) -> None:
    config = BreakerConfig(failures=3, ratio=0.5, window_s=10)
    breaker, now = Breaker(config), 0.0
    calls: list[tuple[float, bool]] = []
    for ok, pause_s in outcomes:
        now += pause_s
        breaker.record(ok, now)
        calls = [(at, each) for at, each in [*calls, (now, ok)] if at >= now - config.window_s]
        failed = sum(not each for _, each in calls)
        opens = failed >= config.failures and failed >= config.ratio * len(calls)
        assert (breaker.state is BreakerState.OPEN) is opens
        if opens:
            return


def test_a_probe_whose_asker_left_lets_another_through() -> None:
    breaker = Breaker(BreakerConfig(failures=1))
    breaker.record(False, 0.0)
    assert breaker.admit(1.0) is None
    breaker.record(None, 1.0)
    assert breaker.admit(1.0) is None


def test_a_probe_that_lasts_lets_another_through_and_its_late_answer_counts_once() -> None:
    breaker = Breaker(BreakerConfig(failures=1, longest_open_s=3.0))
    breaker.record(False, 0.0)
    assert breaker.admit(1.0) is None, "a plan, which takes a minute"
    assert breaker.admit(3.9) is not None
    assert breaker.admit(4.0) is None
    breaker.record(True, 4.1)
    assert breaker.state is BreakerState.CLOSED
    breaker.record(True, 60.0)
    assert breaker.state is BreakerState.CLOSED


def test_repetitions_are_a_part_of_the_calls_and_some_a_second() -> None:
    budget = RetryBudget(ratio=0.125, per_s=2, reserve=2)
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(8):
        budget.earn()
    assert [budget.spend(0.0) for _ in range(2)] == [True, False]
    assert [budget.spend(0.5) for _ in range(2)] == [True, False]
    assert [budget.spend(60.0) for _ in range(3)] == [True, True, False]
    assert (budget.repeated, budget.refused) == (6, 4)


def test_a_burst_may_wait_for_a_while_and_a_queue_that_stands_may_not() -> None:
    queue = AdmissionQueue(most=16, burst_s=0.1, standing_s=0.02)
    assert not queue.is_too_long(5.0)
    queue.join(5.0)
    assert not queue.is_too_long(5.09)
    assert queue.is_too_long(5.11)
    queue.leave(5.11)
    queue.join(5.12)  # nobody waited, but for a moment only
    assert not queue.is_too_long(5.13)
    assert queue.is_too_long(5.15), "it stands, so 0.02 s are the most"
    queue.leave(5.15)
    queue.join(5.15)
    queue.unread = 1
    assert queue.is_too_long(5.15), "nor may so many wait"
    queue.unread = 0
    queue.join(5.15)
    assert queue.is_too_long(5.15), "nor may so many wait"
    queue.leave(5.16)
    queue.leave(5.16)
    for _ in range(15):
        queue.join(5.3)  # what comes after a while is a new burst
    assert not queue.is_too_long(5.39)
    queue.join(5.3)
    assert queue.is_too_long(5.39), "no room"
    queue.leave(5.39)
    queue.unread = 1
    assert queue.is_too_long(5.39), "no room for those that were read and do not wait yet"


async def test_requests_begin_a_few_at_a_time_in_their_order() -> None:
    load = HttpLoad()
    began: list[int] = []
    turns: list[int] = []

    async def request(number: int) -> None:
        await load.turn()
        began.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(3 * TURN)]
    leaves = tasks[TURN + 1]
    while len(began) < len(tasks) - 1:
        before = len(began)
        await asyncio.sleep(0)
        turns.append(len(began) - before)
        leaves.cancel()
    assert began == [number for number in range(3 * TURN) if number != TURN + 1]
    assert max(turns) == TURN
    assert not load.queue.came


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        (b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nhost: a\r\nContent-Length: 0\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nhost: a\r\nContent-Length: 2\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length:02\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nExpect: 100-continue\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nhost: a\r\n\r\n", False),
        (b"POST / HTTP/1.1\r\nhost: a\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nhost: a\r\n", False),
        (b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n", False),
        (b"GET /a HTTP/1.1\n\nGET /b HTTP/1.1\r\n\r\n", False),
        (b"", False),
    ],
)
def test_what_is_plain_enough_to_be_refused_unread(data: bytes, plain: bool) -> None:
    assert is_plain(data) is plain


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    sock = bind("127.0.0.1", 0)
    nagle: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        nagle.set_result(not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(accepted, sock=sock):
        _, writer = await asyncio.open_connection(*sock.getsockname()[:2])
        assert not await nagle
        writer.close()


# --- idempotency keys ---------------------------------------------------------------------------------------


def test_what_a_key_leads_to() -> None:
    digest = request_digest("POST", "/v1/jobs", "", b"{}")
    claim = KeptAnswer(request=digest, gateway="gateway-east", incarnation="g1")
    alive = service()
    assert next_step(None, digest, None, registry_known=True) == "act"
    assert next_step(claim, "other", alive, registry_known=True) == "other request"
    assert next_step(claim, digest, alive, registry_known=True) == "in progress"
    assert next_step(claim, digest, None, registry_known=True) == "take over"
    assert next_step(claim, digest, None, registry_known=False) == "in progress"
    assert next_step(claim, digest, service(incarnation="g2"), registry_known=True) == "take over"
    faulted = service(state=InstanceState.FAULTED)
    assert next_step(claim, digest, faulted, registry_known=True) == "take over"
    done = claim.model_copy(update={"status": 201})
    assert next_step(done, digest, alive, registry_known=True) == "repeat"


def test_keys_are_of_one_user_and_requests_differ_by_body_and_query() -> None:
    assert key_token("ann", "k") != key_token("bob", "k")
    digests = {
        request_digest("POST", "/v1/jobs", query, body) for query in ("", "a=1") for body in (b"", b"{}")
    }
    assert len(digests) == 4


# --- feeds --------------------------------------------------------------------------------------------------


def lines(*sequences: int, size: int = 10) -> list[EventLine]:
    return [EventLine(sequence, b"x" * size) for sequence in sequences]


def test_a_feed_keeps_the_last_and_knows_from_where_on_it_has_all() -> None:
    feed = SubjectHub(3, lines(4, 7), EventsConfig(kept_lines=3, read_lines=3))
    assert (feed.floor, feed.low, feed.high) == (3, 0, 2)
    for line in lines(9, 12):
        feed.add(line)
    assert (feed.floor, feed.low, feed.high) == (5, 1, 4)
    assert [feed.number_behind(position) for position in (4, 7, 8, 11, 12, 99)] == [1, 2, 2, 3, 4, 4]
    piece, number, last = feed.take(2)
    assert (piece, number, last and last.sequence) == (b"x" * 20, 4, 12)


def test_a_feed_is_bounded_in_bytes_and_gives_them_in_pieces() -> None:
    feed = SubjectHub(1, [], EventsConfig(kept_bytes=300_000, read_bytes=1000))
    for line in lines(*range(1, 100), size=40_000):
        feed.add(line)
    assert feed.high - feed.low == 7
    piece, number, _ = feed.take(feed.low)
    assert len(piece) == 80_000 > PIECE_BYTES
    assert number == feed.low + 2
    feed.add(EventLine(100, b"x" * 400_000))
    assert feed.high - feed.low == 1, "the newest stays, however large"


async def test_all_who_wait_are_woken_and_others_get_their_turn_between() -> None:
    feed = SubjectHub(1, [], EventsConfig(woken=2))
    order: list[str] = []

    async def follower(number: int) -> None:
        assert await feed.wait(30)
        order.append(f"follower {number}")

    followers = [asyncio.create_task(follower(number)) for number in range(6)]
    await asyncio.sleep(0)  # each has had its first turn, and waits
    feed.wake()
    asyncio.get_running_loop().call_soon(order.append, "request")
    await asyncio.gather(*followers)
    assert order.index("request") <= 4
    assert len(order) == 7
    assert not await feed.wait(0)
