"""Sessions by what holds now: the version's record, listeners that fail, names that clients make up."""

from __future__ import annotations

import asyncio

import httpx

from dmsc.metrics.exposition import Exposition
from entities.gateway import Gateway
from entities.gateway.generation.session import GenerationSession
from tests.integration.entities.serving_stand_in import Served, answer_to, complete, deploy
from tests.patience import PATIENCE_S
from tests.waiting import eventually


async def test_sessions_are_bound_by_what_the_record_says_now(
    served: Served, http: httpx.AsyncClient, gateway: Gateway
) -> None:
    """A session that began while all stages had a cache is whole once one has none."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 3:
            reached.set()
            await go.wait()

    served.gate(gate)
    asked = asyncio.create_task(complete(http))
    async with asyncio.timeout(PATIENCE_S):
        await reached.wait()
    former = {each.sid: order for each in served.working for order in each.bound.values()}
    assert [order.whole for order in former.values()] == [False, False]
    changed = await deploy(served.bus, cached=False)
    await eventually(lambda: gateway.generations.book.get("letters") == changed)
    lost = next(each for each in served.last if each.bound)
    others = [each for each in served.instances.values() if each is not lost]
    await lost.kill()
    go.set()
    assert (await asked).json()["choices"][0]["text"] == answer_to("abc", 8)
    later = [order for each in others for order in each.orders if order.attempt > 0]
    assert later
    assert all(order.whole for order in later)


async def test_an_owner_without_a_cache_is_obeyed_before_the_record_says_so(
    served: Served, http: httpx.AsyncClient
) -> None:
    for each in served.last:
        each.is_cached = False
    response = await complete(http)
    assert response.json()["choices"][0]["text"] == answer_to("abc", 8)
    assert sum(each.refused_binds for each in served.last) == 1
    assert all(order.whole for each in served.last for order in each.orders)


async def test_a_listener_that_fails_ends_no_session(
    served: Served, http: httpx.AsyncClient, gateway: Gateway
) -> None:
    failed: list[str] = []

    def broken(news: object) -> None:
        failed.append(type(news).__name__)
        raise RuntimeError("a listener's own mistake")

    def listens(session: GenerationSession) -> None:
        session.on_end(broken)
        session.on_over(broken)
        broken(session)

    keeper = gateway.generations.keeper
    keeper.observers.insert(0, listens)
    keeper.needed = broken
    reached, go = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        if number == 3:
            reached.set()
            await go.wait()

    served.gate(gate)
    asked = asyncio.create_task(complete(http))
    async with asyncio.timeout(PATIENCE_S):
        await reached.wait()
    await eventually(lambda: "Generation" in failed, "the clock of all sessions has called it")
    go.set()
    assert (await asked).json()["choices"][0]["text"] == answer_to("abc", 8)
    await eventually(lambda: not keeper.open and not served.working)
    assert {"GenerationSession", "Generation", "int", "AnswerTrace"} == set(failed)
    served.gate(None)
    assert (await complete(http)).status_code == 200, "the clock of all sessions goes on"


async def test_names_that_are_made_up_are_no_series_and_who_is_gone_has_no_load(
    served: Served, http: httpx.AsyncClient, gateway: Gateway
) -> None:
    for number in range(5):
        for each in served.last:
            each.fails = f"made_up_{number}: on purpose"
        assert (await complete(http)).status_code == 500
        assert (await complete(http, model=f"made-up-{number}")).status_code == 404
        assert (await complete(http, model=f"letters@made-up-{number}")).status_code == 404
    exposition = Exposition()
    exposition.add(served.bus, gateway)
    page = (await exposition.render(""))[0].decode()
    assert "made" not in page
    (line,) = [each for each in page.splitlines() if each.startswith("dmsc_service_requests_total{")]
    assert 'outcome="failed"' in line
    assert line.endswith(" 5.0")
    loads = gateway.generations.keeper.ports.loads
    gone = next(sid for sid in served.instances if sid in loads)
    await served.instances[gone].kill()
    await eventually(lambda: gone not in loads)
