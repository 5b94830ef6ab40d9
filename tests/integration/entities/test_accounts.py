"""The accountant against a real server: all is counted once, through kills and beside another one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from entities.accountant import Accountant, AccountantConfig
from schemas.accounts import SLICE_S, AccountQuery, AccountStatement
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError
from schemas.queue import QueueShare
from tests.builders.accounts import report, stretch
from tests.builders.jobs import job
from tests.builders.steps import claim, member
from tests.integration.entities.conftest import Dial, Start
from tests.patience import PATIENCE_S
from tests.waiting import eventually

STEPS, MICROBATCHES, TOLD = 30, 8, 60
PRICES = """
currency: EUR
clusters: {a: [{from: 2020-01-01, price_per_device_hour: 36, price_per_kwh: 0}]}
budgets:
  - {user: ruth, cost: LIMIT, per: all, at_end: stop}
"""


async def tell(dial: Dial, began: float) -> Bus:
    """A node of two slots for ten minutes: j1 has slot 0, and slot 1 after half of the time.

    Each step's microbatches are claimed once, that of number 0 twice, and every tenth claim is repeated.
    """
    agent = await dial("a-n", EntityKind.CLUSTER)
    instance = await dial("j1-s0-r0", EntityKind.INSTANCE)
    await agent.bucket(subjects.JOB_RECORD).put(
        job("j1", user="ruth", queue_share=QueueShare(tenant="lab")), job="j1"
    )
    for number in range(TOLD):
        at = began + 10 * (number + 1)
        half = min(at, began + 300)
        told = [stretch(0, began, at), stretch(1, began, half, payer=None)]
        if at > half:
            told.append(stretch(1, half, at))
        await agent.publish(
            subjects.SLOT_REPORT, report(*told, number=number, at=at, since=began), agent="a-n"
        )
    await claimed(instance, range(STEPS // 2))
    await agent.barrier()
    return instance


async def claimed(instance: Bus, steps: range) -> None:
    for step in steps:
        for number in range(MICROBATCHES):
            for again in range(2 if number == 0 else 1):
                owner = member("j1-s0-r0", f"i{1 + again}")
                said = claim(number, owner, job="j1", step=step, forward_ms=100.0 + again, backward_ms=200.0)
                for _ in range(2 if (step + number) % 10 == 0 else 1):
                    await instance.publish(subjects.STEP_CLAIM, said, job="j1", sid="j1-s0-r0")
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


async def test_a_budget_is_told_when_it_is_used_up_and_when_it_is_larger(
    dial: Dial, start: Start, tmp_path: Path
) -> None:
    began = time.time() - 1000
    await tell(dial, began)
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES.replace("LIMIT", "5"))
    bus = await dial("accountant", EntityKind.ACCOUNTANT)
    await start(Accountant(bus, AccountantConfig(prices_file=prices, every_s=0.1)))
    states = bus.bucket(subjects.BUDGET_STATE)

    async def state() -> str:
        return next((entry.message.use.state for entry in await states.entries()), "")

    async def is_(wanted: str) -> bool:
        return await state() == wanted

    await eventually(lambda: is_("used up"))
    (entry,) = await states.entries()
    assert entry.message.use.why.startswith("budget of user ruth: 9 of 5 EUR in all used (by j1 9")
    prices.write_text("budgets: [{cost: 3}]")  # a broken edit: the earlier one holds
    prices.write_text(PRICES.replace("LIMIT", "500"))
    await eventually(lambda: is_("within"))
    prices.write_text("currency: EUR")
    await eventually(lambda: is_(""))
