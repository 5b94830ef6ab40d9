"""The accountant against a real server: all is counted once, through kills and beside another one."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from dmsc.client.async_client import AsyncClient
from entities.accountant import Accountant, AccountantConfig
from entities.authorizer.access.access_policy import default_text
from entities.service_registry.service import ServiceRegistry
from schemas.accounts import SLICE_S, AccountQuery, AccountStatement, ServiceUse, UseReport
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError, Refused
from schemas.queue import QueueShare
from tests.builders.accounts import report, stretch
from tests.builders.jobs import job, spec
from tests.builders.steps import claim, member
from tests.integration.entities.conftest import Dial, Start, mesh_without_nodes
from tests.patience import PATIENCE_S
from tests.waiting import eventually

STEPS, MICROBATCHES, TOLD = 30, 8, 60
PRICES = """
currency: EUR
clusters: {a: [{from: 2020-01-01, price_per_device_hour: 36, price_per_kwh: 0}]}
budgets:
  - {user: ruth, cost: LIMIT, per: all, at_end: stop}
"""


async def tell(dial: Dial, began: float, name: str = "j1") -> Bus:
    """A node of two slots for ten minutes: a job has slot 0, and slot 1 after half of the time.

    Of the first half of its steps, each microbatch is claimed once, number 0 twice, and every tenth claim
    comes again. Returns the connection of its instance.
    """
    agent = await dial("a-n", EntityKind.CLUSTER)
    for number in range(TOLD):
        at = began + 10 * (number + 1)
        half = min(at, began + 300)
        told = [stretch(0, began, at, payer=name), stretch(1, began, half, payer=None)]
        if at > half:
            told.append(stretch(1, half, at, payer=name))
        await agent.publish(
            subjects.SLOT_REPORT, report(*told, number=number, at=at, since=began), agent="a-n"
        )
    await agent.barrier()
    instance = await dial(f"{name}-s0-r0", EntityKind.INSTANCE)
    await claimed(instance, range(STEPS // 2), name)
    return instance


async def claimed(instance: Bus, steps: range, name: str = "j1") -> None:
    for step in steps:
        for number in range(MICROBATCHES):
            for again in range(2 if number == 0 else 1):
                owner = member(f"{name}-s0-r0", f"i{1 + again}")
                said = claim(number, owner, job=name, step=step, forward_ms=100.0 + again, backward_ms=200.0)
                for _ in range(2 if (step + number) % 10 == 0 else 1):
                    await instance.publish(subjects.STEP_CLAIM, said, job=name, sid=f"{name}-s0-r0")
    await instance.barrier()


async def killed_at_a_slice(bus: Bus, accountant: Accountant) -> None:
    """It is killed as soon as its first slice is seen; the book is written after that."""
    current, written = asyncio.Event(), asyncio.Event()

    async def seen(change: Change) -> None:
        if not change.key:
            current.set()
        elif current.is_set():
            written.set()

    watch = await bus.bucket(subjects.ACCOUNT_SLICE).watch(seen)
    await current.wait()
    working = asyncio.create_task(accountant.advance())
    waiting = asyncio.create_task(written.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for task in (working, waiting):
        task.cancel()
    await asyncio.wait({working, waiting})
    await watch.stop()
    await accountant.close()


async def is_torn(bus: Bus) -> bool:
    """Whether slices have more than the book knows: somebody died between these two writes."""
    book = await bus.bucket(subjects.ACCOUNT_POSITION).get(leader=True, part="book", name="mesh")
    known = {} if book is None else book.message.positions
    slices = await bus.bucket(subjects.ACCOUNT_SLICE).entries()
    return any(
        position > known.get(name, 0) for each in slices for name, position in each.message.positions.items()
    )


async def asked(bus: Bus, began: float, **more: str) -> AccountStatement:
    question = AccountQuery(since=began - SLICE_S, until=began + 3 * SLICE_S, **more)
    return await bus.request(subjects.ACCOUNT_QUERY, question, timeout_s=PATIENCE_S)


def check(statement: AccountStatement, name: str) -> None:
    (line,) = statement.lines
    assert line.name == name
    assert line.held_s == pytest.approx(900)
    assert line.busy_s == pytest.approx(STEPS * MICROBATCHES * 0.3)
    assert line.recomputed_s == pytest.approx(STEPS * 0.301)
    assert (line.units, line.recomputed_units) == (STEPS * (MICROBATCHES + 1), STEPS)
    assert line.price == pytest.approx(9.0)
    assert statement.idle is not None
    assert statement.idle.held_s == pytest.approx(300)
    assert statement.offered_s == pytest.approx(1200)
    assert abs(statement.unaccounted_s) < 1e-3 * statement.offered_s


async def test_kills_and_a_second_accountant_count_nothing_twice(
    dial: Dial, start: Start, tmp_path: Path
) -> None:
    """It is killed within its writes, again and again, while another one writes the same accounts."""
    began = time.time() - 1000
    instance = await tell(dial, began)
    records = instance.bucket(subjects.JOB_RECORD)
    await records.put(job("j1", user="ruth", queue_share=QueueShare(tenant="lab")), job="j1")
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES.replace("LIMIT", "100"))
    config = AccountantConfig(prices_file=prices, batch=7, every_s=3600)
    buses = [await dial(name, EntityKind.ACCOUNTANT) for name in ("accountant", "accountant-2")]
    torn = 0
    for _ in range(8):
        await killed_at_a_slice(buses[0], Accountant(buses[0], config))
        torn += await is_torn(buses[0])
    assert torn, "never killed between two writes"

    await claimed(instance, range(STEPS // 2, STEPS))
    outcomes = await asyncio.gather(
        *(Accountant(bus, config).advance() for bus in buses), return_exceptions=True
    )
    assert any(isinstance(outcome, DmscError) for outcome in outcomes), "the two never met"

    gateway = await dial("gateway-a", EntityKind.GATEWAY)
    await start(Accountant(buses[0], config))
    check(await asked(gateway, began), "j1")
    check(await asked(gateway, began, by="user"), "ruth")
    check(await asked(gateway, began, by="tenant"), "lab")
    own = await asked(gateway, began, user="ann")
    assert (own.lines, own.budgets, own.idle) == ((), (), None)
    with pytest.raises(BadInput, match="at most 100 days"):
        await gateway.request(
            subjects.ACCOUNT_QUERY, AccountQuery(since=0, until=began), timeout_s=PATIENCE_S
        )


async def test_a_used_up_budget_holds_jobs_and_accounts_are_their_users(
    dial: Dial, start: Start, registry: ServiceRegistry, tmp_path: Path
) -> None:
    """With a real orchestrator and gateway: a job waits for the budget, and no longer once it is larger."""
    users = {"ruth": "researcher", "rob": "researcher", "vera": "viewer", "olga": "operator"}
    url = await mesh_without_nodes(dial, start, tmp_path, default_text(), users)
    prices, began = tmp_path / "prices.yaml", time.time() - 1000
    prices.write_text(PRICES.replace("LIMIT", "5"))
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(AsyncClient(url, token=name)) for name in users}
        ruth, olga = clients["ruth"], clients["olga"]
        name = (await ruth.submit(job().spec)).job
        await tell(dial, began, name)
        config = AccountantConfig(prices_file=prices, every_s=0.1)
        await start(Accountant(await dial("accountant", EntityKind.ACCOUNTANT), config))

        async def reason() -> str:
            return (await olga.queue()).jobs[0].reason

        async def is_held() -> bool:
            return (await reason()).startswith(
                f"held: budget of user ruth: 9 of 5 EUR in all used (by {name} 9"
            )

        await eventually(is_held)
        prices.write_text("budgets: [{cost: 3}]")  # a broken edit: what was right holds
        assert await is_held()
        since = {"since": began - SLICE_S}
        own = await ruth.accounts(**since)
        assert (own.only, [line.name for line in own.lines], own.idle) == ("ruth", [name], None)
        assert [use.state for use in own.budgets] == ["used up"]
        for other in ("rob", "vera"):
            none = await clients[other].accounts(**since)
            assert (none.only, none.lines, none.budgets) == (other, (), ())
            for wanted in ({"user": "ruth"}, {"everybody": True}):
                with pytest.raises(Refused):
                    await clients[other].accounts(**since, **wanted)
        whole = await olga.accounts("user", **since)
        assert (whole.only, [line.name for line in whole.lines]) == (None, ["ruth"])
        assert whole.idle is not None
        assert (await olga.accounts(**since, user="ruth")).lines == own.lines
        assert (await olga.accounts(**since, service="chat")).lines == (), "no version of that worked"
        with pytest.raises(BadInput, match="ends after it begins"):
            await ruth.accounts(since=began, until=began - 1)
        prices.write_text(PRICES.replace("LIMIT", "500"))

        async def is_free() -> bool:
            return not (await reason()).startswith("held")

        await eventually(is_free)


async def test_tokens_are_counted_once_and_a_services_work_is_its_users(dial: Dial) -> None:
    """Two accountants in turn; reports of a gateway come twice or not at all, and it begins anew."""
    # Within one slice: what a version did is its users' slice by slice.
    began = (time.time() - 1000) // SLICE_S * SLICE_S + 10
    served = spec(serve={"service": "chat"})
    agent, gateway = await dial("a-n", EntityKind.CLUSTER), await dial("gateway-a", EntityKind.GATEWAY)
    orchestrator = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    await orchestrator.bucket(subjects.JOB_RECORD).put(job("v", spec=served, user="olga"), job="v")
    accountants = [
        Accountant(await dial(name, EntityKind.ACCOUNTANT), AccountantConfig(every_s=3600))
        for name in ("accountant", "accountant-2")
    ]
    for number, incarnation, tokens in ((0, "g1", 10), (0, "g1", 10), (2, "g1", 70), (0, "g2", 30)):
        at = began + 100
        uses = tuple(
            ServiceUse(job="v", user=user, began=began, tokens=count, answers=1)
            for user, count in (("ruth", tokens), ("rob", tokens // 10))
        )
        report_of = UseReport(gateway="gateway-a", incarnation=incarnation, number=number, at=at, uses=uses)
        await gateway.publish(subjects.USE_REPORT, report_of, gateway="gateway-a")
        held = stretch(0, began, at, payer="v", busy_s=22.0, recomputed_s=3.0)
        idle = stretch(1, began, at, payer=None)
        told = report(held, idle, number=number, at=at, since=began)
        await agent.publish(subjects.SLOT_REPORT, told, agent="a-n")
        for bus in (agent, gateway):
            await bus.barrier()
        for accountant in accountants:
            with suppress(DmscError):  # the other one was quicker; the next turn reads anew
                await accountant.advance()
    ready = asyncio.Event()
    serving = asyncio.create_task(accountants[0].run(ready))
    await ready.wait()
    (line,) = (await asked(gateway, began, by="service")).lines
    assert (line.name, line.tokens, line.answers) == ("chat", 110, 4)
    assert (line.held_s, line.busy_s, line.recomputed_s) == (
        pytest.approx(100.0),
        pytest.approx(22.0),
        pytest.approx(3.0),
    )
    statement = await asked(gateway, began, by="user")
    assert {each.name: (round(each.held_s, 3), each.tokens) for each in statement.lines} == {
        "olga": (78.0, 0),
        "ruth": (20.0, 100),
        "rob": (2.0, 10),
    }
    assert abs(statement.unaccounted_s) < 1e-6
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for accountant in accountants:
        await accountant.close()
