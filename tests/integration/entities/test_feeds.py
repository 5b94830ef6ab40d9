"""Feeds at the gateways' doors: pushes of several gateways, repetitions, bad records, and who may do what."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import httpx
import pytest

from bus import subjects
from bus.connection import Bus
from bus.files.feed_rows import FeedRows, find_feed
from bus.nats import jetstream
from dmsc.client.async_client import AsyncClient
from entities.authorizer.access.access_policy import default_text
from entities.gateway import Gateway, GatewayConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind
from schemas.errors import (
    BadInput,
    Conflict,
    LastingConflict,
    NotFound,
    OverQuota,
    Refused,
    UnreadableRecord,
)
from schemas.feeds import FeedPieceData, Pushed
from schemas.job import JobSpec
from tests.integration.entities.conftest import Dial, Start, bearer, mesh_without_nodes
from tests.patience import PATIENCE_S
from tests.waiting import eventually

QUOTAS = """
quotas:
  - {name: small, roles: [researcher], stored_gib: 1, datasets: 2}
"""
FIELDS = {"x": "int64"}


@pytest.fixture
async def urls(
    dial: Dial, start: Start, registry: ServiceRegistry, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Two gateways of one mesh."""
    access = default_text().partition("\nquotas:")[0] + QUOTAS
    users = {"ruth": "researcher", "rob": "researcher", "vera": "viewer", "olga": "operator"}
    first = await mesh_without_nodes(dial, start, tmp_path_factory.mktemp("mesh"), access, users)
    bus = await dial("gateway-b", EntityKind.GATEWAY)
    second = Gateway(bus, GatewayConfig(cluster="b", http_port=0))
    await start(second)
    assert second.url is not None
    return [first, second.url]


@pytest.fixture
async def ruth(urls: list[str]) -> AsyncIterator[list[AsyncClient]]:
    """A client of hers at each gateway."""
    async with AsyncClient(urls[0], token="ruth") as one, AsyncClient(urls[1], token="ruth") as other:
        yield [one, other]


async def records_of(bus: Bus, name: str) -> list[object]:
    """All records of a feed in their order, as a job reads them."""
    feed = await find_feed(bus, name)
    lines = b""
    async with FeedRows(bus, name, feed.uid) as rows:
        assert not rows.broken
        for segment in rows.segments:
            for piece in segment.pieces:
                entry = await bus.bucket(subjects.FEED_PIECE).get(
                    leader=True, uid=feed.uid, digest=piece.digest
                )
                assert entry is not None
                assert isinstance(entry.message, FeedPieceData)
                lines += entry.message.data
    return [json.loads(line) for line in lines.splitlines()]


async def test_pushes_at_two_gateways_are_each_stored_once(ruth: list[AsyncClient], dial: Dial) -> None:
    """Every push goes to both gateways with its key, in any order, as after an answer that was lost."""
    chosen = random.SystemRandom().randrange(1 << 32)
    print(f"seed {chosen}")
    order = random.Random(chosen)
    await ruth[0].create_feed("numbers", FIELDS)
    pushes = [[{"x": 10 * number + place} for place in range(number % 3 + 1)] for number in range(20)]
    calls = [(client, number) for number in range(len(pushes)) for client in ruth]
    order.shuffle(calls)
    answers = await asyncio.gather(
        *(
            client.push("numbers", pushes[number], idempotency_key=f"push-{number}")
            for client, number in calls
        )
    )
    found: dict[int, set[Pushed]] = {}
    for (_, number), answer in zip(calls, answers, strict=True):
        found.setdefault(number, set()).add(answer)
    assert all(len(same) == 1 for same in found.values())
    stored = await records_of(await dial("reader", EntityKind.ORCHESTRATOR), "numbers")
    assert len(stored) == sum(map(len, pushes))
    for number, (answer,) in found.items():
        assert stored[answer.first : answer.first + answer.records] == pushes[number]
    feed = await ruth[1].feed("numbers")
    assert (feed.records, feed.pushes, feed.closed) == (len(stored), len(pushes), False)


async def test_a_push_that_a_gateway_stored_and_did_not_answer_is_not_stored_again(
    ruth: list[AsyncClient], dial: Dial, start: Start, urls: list[str]
) -> None:
    """A gateway that knows nothing of the feed yet finds the push in its rows."""
    await ruth[0].create_feed("numbers", FIELDS)
    first = await ruth[0].push("numbers", [{"x": 1}], idempotency_key="one")
    await ruth[0].push("numbers", [{"x": 2}])
    later = Gateway(await dial("gateway-c", EntityKind.GATEWAY), GatewayConfig(cluster="c", http_port=0))
    await start(later)
    async with AsyncClient(later.url, token="ruth") as client:
        assert await client.push("numbers", [{"x": 1}], idempotency_key="one") == first
        assert (await client.push("numbers", [{"x": 3}], idempotency_key="one")).first == 2  # another body
        assert (await client.feed("numbers")).records == 3


async def test_a_closed_feed_takes_nothing_more(ruth: list[AsyncClient]) -> None:
    feed = await ruth[0].create_feed("numbers", FIELDS)
    assert await ruth[1].create_feed("numbers", FIELDS) == feed
    with pytest.raises(Conflict, match="a feed numbers of ruth already, with x: int64; take another name"):
        await ruth[0].create_feed("numbers", {"x": "float32"})
    kept = await ruth[0].push("numbers", b'{"x": 1}\n{"x": 2}', idempotency_key="one")
    assert (await ruth[1].close_feed("numbers")).closed
    assert (await ruth[0].close_feed("numbers")).records == 2
    for client in ruth:
        with pytest.raises(Conflict, match="feed numbers is closed: it takes no more records"):
            await client.push("numbers", [{"x": 3}])
        assert await client.push("numbers", b'{"x": 1}\n{"x": 2}', idempotency_key="one") == kept


async def test_a_push_to_a_closed_feed_is_not_to_be_retried(ruth: list[AsyncClient], urls: list[str]) -> None:
    await ruth[0].create_feed("numbers", FIELDS)
    await ruth[0].close_feed("numbers")
    async with httpx.AsyncClient(base_url=urls[1], headers=bearer("ruth"), trust_env=False) as http:
        refused = await http.post("/v1/feeds/numbers/records", content=b'{"x": 1}')
        taken = await http.put("/v1/feeds/numbers", json={"fields": {"x": "text"}})
    for answer in (refused, taken):
        assert (answer.status_code, answer.json()["retryable"]) == (409, False)
        assert answer.json()["code"] == "lasting_conflict"
    with pytest.raises(LastingConflict, match="feed numbers is closed"):
        await ruth[0].push("numbers", [{"x": 1}])


async def test_a_job_that_names_no_feed_is_refused_at_submission(ruth: list[AsyncClient]) -> None:
    await ruth[0].create_feed("numbers", FIELDS)
    feed = {"kind": "feed", "feed": "other"}
    mixed = {"kind": "feed", "order": "shuffled", "mixture": [{"feed": "numbers"}, {"feed": "other"}]}
    for place, data in (("data", feed), ("data.mixture[1]", mixed)):
        with pytest.raises(NotFound) as refused:
            await ruth[0].submit(feed_job(data))
        assert refused.value.text == (
            f"{place}.feed: there is no feed other; `dmsc data create other FIELD=TYPE` makes one"
        )
    with pytest.raises(BadInput) as refused_url:
        await ruth[0].submit(feed_job({"source": "bus://feeds/numbers"}))
    assert refused_url.value.text == (
        "data.source: bus://feeds/numbers is a feed, which a job names as data: {kind: feed, feed: numbers}"
    )
    assert (await ruth[0].submit(feed_job(feed | {"feed": "numbers"}))).spec.data.feed == "numbers"


def feed_job(data: dict[str, object]) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "fed", "model": {"factory": "a:b"}, "data": data, "training": {"steps": 2}}
    )


async def test_a_bad_record_refuses_its_push(ruth: list[AsyncClient]) -> None:
    await ruth[0].create_feed("numbers", FIELDS)
    with pytest.raises(BadInput, match=r"record 1 \(line 2\), field x: needs int64, and has a text"):
        await ruth[0].push("numbers", [{"x": 1}, {"x": "2"}])
    assert (await ruth[0].feed("numbers")).records == 0


async def test_who_may_do_what(urls: list[str], ruth: list[AsyncClient]) -> None:
    await ruth[0].create_feed("numbers", FIELDS)
    await ruth[0].push("numbers", [{"x": 1}])
    async with (
        AsyncClient(urls[0], token="rob") as rob,
        AsyncClient(urls[1], token="vera") as vera,
        AsyncClient(urls[1], token="olga") as olga,
    ):
        assert [feed.name for feed in await rob.feeds()] == ["numbers"]
        with pytest.raises(Refused, match="feed numbers is ruth's, who pushes to it; create one of your own"):
            await rob.push("numbers", [{"x": 2}])
        with pytest.raises(Refused, match="who closes it"):
            await rob.close_feed("numbers")
        with pytest.raises(Refused):
            await rob.delete_feed("numbers")
        for refused in (vera.feeds(), vera.push("numbers", [{"x": 2}]), vera.create_feed("v", FIELDS)):
            with pytest.raises(Refused):
                await refused
        await olga.push("numbers", [{"x": 2}])
        await olga.delete_feed("numbers")
    for client in ruth:
        with pytest.raises(NotFound, match="there is no feed numbers"):
            await client.push("numbers", [{"x": 3}])
    await ruth[1].create_feed("numbers", FIELDS)
    assert (await ruth[0].push("numbers", [{"x": 4}])).first == 0


async def test_names_and_bodies_that_are_none(urls: list[str]) -> None:
    async with httpx.AsyncClient(base_url=urls[0], headers=bearer("ruth"), trust_env=False) as http:
        for name in ("a.b", "a%20b", "%3E", "%2A", "..%2Fa", "x" * 121, "%0A"):
            answers = [
                await http.put(f"/v1/feeds/{name}", json={"fields": FIELDS}),
                await http.post(f"/v1/feeds/{name}/records", content=b'{"x": 1}'),
            ]
            for answer in answers:
                assert answer.status_code in (400, 404, 405, 422), (name, answer.text)
        for fields in ({}, {"x": "no"}, {"x y": "text"}, {str(n): "text" for n in range(65)}):
            assert (await http.put("/v1/feeds/f", json={"fields": fields})).status_code in (400, 422)
        assert (await http.put("/v1/feeds/f", json={"fields": FIELDS})).status_code == 201
        large = await http.post("/v1/feeds/f/records", content=b" " * (5 << 20))
        assert large.status_code == 413
        one = await http.post(
            "/v1/feeds/f/records",
            content=b'{"x": 1}\n',
            headers={"content-type": "application/x-www-form-urlencoded"},
        )
        assert one.json() == {"feed": "f", "push": 0, "first": 0, "records": 1}


async def test_records_count_in_a_quota(urls: list[str], ruth: list[AsyncClient]) -> None:
    for name in ("one", "two"):
        await ruth[0].create_feed(name, {"text": "text"})
    with pytest.raises(OverQuota, match="data sets and feeds: at most 2"):
        await ruth[0].create_feed("three", {"text": "text"})
    await ruth[0].create_feed("one", {"text": "text"})  # it is there
    await ruth[0].push("one", [{"text": "x" * 1000}])
    use = (await ruth[1].whoami()).use
    assert (use.datasets, use.stored_bytes) == (2, 1012)


async def test_a_row_that_cannot_be_read_is_never_written_over(
    urls: list[str], ruth: list[AsyncClient], dial: Dial
) -> None:
    await ruth[0].create_feed("numbers", FIELDS)
    await ruth[0].push("numbers", [{"x": 1}])
    bus = await dial("orchestrator-2", EntityKind.ORCHESTRATOR)
    feed = await find_feed(bus, "numbers")
    subject = subjects.FEED_SEGMENT(uid=feed.uid, number=1)
    await jetstream.publish(bus.connection, subject, b"no row", timeout_s=PATIENCE_S)
    async with FeedRows(bus, "numbers", feed.uid) as rows:
        await eventually(lambda: rows.broken == "feed numbers is damaged: the row of push 1 can't be read")
        assert rows.count == 1
    for client in ruth:
        with pytest.raises(Conflict, match="feed numbers is damaged: the row of push 1 can't be read"):
            await client.push("numbers", [{"x": 2}])
    async with AsyncClient(urls[0], token="olga") as olga:
        await olga.delete_feed("numbers")
    assert await bus.bucket(subjects.FEED_SEGMENT).keys(uid=feed.uid) == []
    await ruth[1].create_feed("numbers", FIELDS)
    assert (await ruth[1].push("numbers", [{"x": 2}])).first == 0


async def test_a_feed_whose_record_cannot_be_read_is_nobody_elses(
    urls: list[str], ruth: list[AsyncClient], dial: Dial
) -> None:
    await ruth[0].create_feed("numbers", FIELDS)
    bus = await dial("orchestrator-2", EntityKind.ORCHESTRATOR)
    await jetstream.publish(bus.connection, subjects.FEED(feed="numbers"), b"none", timeout_s=PATIENCE_S)
    async with AsyncClient(urls[1], token="rob") as rob:
        for asking in (rob.create_feed("numbers", FIELDS), rob.push("numbers", [{"x": 1}])):
            with pytest.raises(UnreadableRecord, match=r"feeds\.feed\.numbers"):
                await asking
    async with AsyncClient(urls[0], token="olga") as olga:
        await olga.delete_feed("numbers")
    await ruth[0].create_feed("numbers", FIELDS)


async def test_a_feed_that_is_followed_tells_of_pushes_and_of_its_end(
    ruth: list[AsyncClient], urls: list[str], dial: Dial
) -> None:
    await ruth[0].create_feed("numbers", FIELDS)
    bus = await dial("orchestrator-2", EntityKind.ORCHESTRATOR)
    feed = await find_feed(bus, "numbers")
    async with FeedRows(bus, "numbers", feed.uid) as rows:
        assert (rows.count, rows.closed) == (0, False)
        for number in range(3):
            news = asyncio.ensure_future(rows.until_news())
            await asyncio.sleep(0)
            await ruth[number % 2].push("numbers", [{"x": number}] * 4)
            await news
        assert rows.count == 12
        assert [rows.segment_of(record).number for record in (0, 3, 4, 11)] == [0, 0, 1, 2]
        await ruth[0].close_feed("numbers")
        await eventually(lambda: rows.closed)
        assert (rows.count, rows.broken) == (12, "")
        async with AsyncClient(urls[0], token="olga") as olga:
            await olga.delete_feed("numbers")
        await eventually(lambda: rows.broken == "feed numbers was deleted")
