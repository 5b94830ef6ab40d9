"""The orchestrator promotes, compares, rolls back; the next one goes on where it was (ADR-0021)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import RegistrationClient
from entities.election.lease import LeadershipLeaseConfig
from entities.orchestrator import Orchestrator, OrchestratorConfig
from entities.orchestrator.policy.promotion_rules import PromotionConfig
from entities.service_registry.service import ServiceRegistry
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Conflict, NotFound
from schemas.module_status import ModuleQuery
from schemas.names import MESH
from schemas.policy import (
    DirectModule,
    ModuleLifecycle,
    ModuleOp,
    ModuleOrder,
    ModuleState,
    PolicyScore,
    PolicySwitch,
    PromoteModule,
    RollBackModule,
)
from tests.builders.records import service
from tests.integration.entities.conftest import Dial, Start
from tests.patience import PATIENCE_S
from tests.waiting import eventually

CONFIG = OrchestratorConfig(
    lease=LeadershipLeaseConfig(lease_s=0.6, check_s=0.1), promotion=PromotionConfig(min_scores=10, window=50)
)
ENTERED = {ModuleOp.ACTIVATE: ModuleState.ACTIVE, ModuleOp.SHADOW: ModuleState.SHADOW}


class Version:
    """One running version of the module `m`, as far as the orchestrator sees it."""

    def __init__(self, bus: Bus, version: str, state: ModuleState) -> None:
        self.bus = bus
        self.version = version
        self.state = state
        self.orders: list[ModuleOp] = []
        self.without: tuple[str, ...] = ()
        self.news = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()

    async def start(self) -> None:
        await self.bus.serve(subjects.MODULE_ORDER, self._obey, sid=self.bus.sender.name)
        await self.tell()

    async def tell(self) -> None:
        await self.bus.command(subjects.MODULE_LIFECYCLE, self.lifecycle(), owner=MESH, module="m")

    def lifecycle(self) -> ModuleLifecycle:
        return ModuleLifecycle(
            module="m",
            version=self.version,
            state=self.state,
            sid=self.bus.sender.name,
            incarnation=self.bus.sender.incarnation,
            without=self.without,
        )

    async def _obey(self, order: ModuleOrder, envelope: Envelope) -> ModuleLifecycle:
        self.orders.append(order.op)
        self.state = ENTERED.get(order.op, self.state)
        self.without = order.jobs if order.op is ModuleOp.DISABLE else self.without
        self.news.set()
        await self.answers.wait()
        return self.lifecycle()

    async def scores(self, value: float, number: int) -> None:
        """As its host would tell them, of suggestions made now."""
        for index in range(number):
            now = time.time()
            told = PolicyScore(
                module="m",
                version=self.version,
                job="j",
                suggestion=f"{self.version}-{now}-{index}",
                action="set_weights",
                at=now,
                step=1,
                shadow=self.state is ModuleState.SHADOW,
                confidence=0.9,
                adopted=False,
                score=value,
                right=value > 0.5,
                reason="r",
            )
            await self.bus.publish(subjects.POLICY_SCORE, told, owner=MESH, module="m")
        await self.bus.barrier()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


async def versions(dial: Dial) -> tuple[Version, Version]:
    one = Version(await dial("m", EntityKind.FUNCTIONAL_MODULE), "1", ModuleState.ACTIVE)
    two = Version(await dial("m-shadow-2", EntityKind.FUNCTIONAL_MODULE), "2", ModuleState.SHADOW)
    await one.start()
    await two.start()
    return one, two


async def orchestrator(dial: Dial, start: Start) -> asyncio.Task[None]:
    return await start(Orchestrator(await dial("orchestrator", EntityKind.ORCHESTRATOR), CONFIG))


async def ask(dial: Dial, row: Any, message: Any) -> Any:
    bus = await dial("gateway-a", EntityKind.GATEWAY)
    return await bus.command(row, message, deadline_s=PATIENCE_S)


async def switches(dial: Dial) -> list[PolicySwitch]:
    bus = await dial("reader")
    items = [item async for item in bus.history(subjects.POLICY_SWITCH, module="m")]
    return [item.message for item in items if isinstance(item.message, PolicySwitch)]


PROMOTE = PromoteModule(module="m", version="2", user="ada")


async def test_a_promoted_version_that_is_worse_gives_way_also_to_a_new_orchestrator(
    dial: Dial, start: Start
) -> None:
    first = await orchestrator(dial, start)
    one, two = await versions(dial)
    switch = await ask(dial, subjects.PROMOTE_MODULE, PROMOTE)
    assert (switch.version, switch.previous, switch.rollback, switch.by) == ("2", "1", False, "ada")
    assert (one.state, two.state) == (ModuleState.SHADOW, ModuleState.ACTIVE)
    again = await ask(dial, subjects.PROMOTE_MODULE, PROMOTE)
    assert again == switch
    await one.scores(0.8, 10)
    await two.scores(0.2, 6)  # too few yet

    first.cancel()
    await asyncio.wait({first})
    await orchestrator(dial, start)
    for version in (one, two):
        await version.tell()
    assert (one.state, two.state) == (ModuleState.SHADOW, ModuleState.ACTIVE)
    await two.scores(0.2, 6)  # with those of before, which the new one has read
    await one.until(lambda: one.state is ModuleState.ACTIVE)
    await two.until(lambda: two.state is ModuleState.SHADOW)
    told = await switches(dial)
    assert [(one.version, one.rollback, one.by) for one in told] == [
        ("2", False, "ada"),
        ("1", True, "orchestrator"),
    ]
    assert told[1].reason == "2 gives way: its score is 0.20 (of 12), 1's 0.80 (of 10) on the same traffic"


async def test_rolled_back_by_hand_and_corrected_when_it_says_otherwise(dial: Dial, start: Start) -> None:
    await orchestrator(dial, start)
    one, two = await versions(dial)
    with pytest.raises(Conflict, match="nothing of m was promoted"):
        await ask(dial, subjects.ROLL_BACK_MODULE, RollBackModule(module="m", user="ada"))
    with pytest.raises(NotFound, match=r"m 3 does not run \(running versions: 1, 2\)"):
        await ask(dial, subjects.PROMOTE_MODULE, PROMOTE.model_copy(update={"version": "3"}))
    await ask(dial, subjects.PROMOTE_MODULE, PROMOTE)
    one.state = ModuleState.ACTIVE  # it was started again, as it had been the first time
    await one.tell()
    await one.until(lambda: one.state is ModuleState.SHADOW)
    back = await ask(dial, subjects.ROLL_BACK_MODULE, RollBackModule(module="m", user="ada", reason="odd"))
    assert (back.version, back.previous, back.rollback, back.reason) == ("1", "2", True, "odd")
    assert (one.state, two.state) == (ModuleState.ACTIVE, ModuleState.SHADOW)


async def test_an_order_by_hand_ends_what_the_promotion_began(dial: Dial, start: Start) -> None:
    await orchestrator(dial, start)
    one, two = await versions(dial)
    await ask(dial, subjects.PROMOTE_MODULE, PROMOTE)
    order = DirectModule(module="m", version="1", op=ModuleOp.ACTIVATE, user="ada")
    await ask(dial, subjects.DIRECT_MODULE, order)
    assert one.state is two.state is ModuleState.ACTIVE
    with pytest.raises(Conflict, match="nothing of m was promoted"):
        await ask(dial, subjects.ROLL_BACK_MODULE, RollBackModule(module="m", user="ada"))


async def test_an_order_by_hand_also_ends_a_promotion_that_is_under_way(dial: Dial, start: Start) -> None:
    """The promoted version has not answered its order yet: nothing of the promotion is left afterwards."""
    running = await orchestrator(dial, start)
    one, two = await versions(dial)
    two.answers.clear()
    promoting = asyncio.create_task(ask(dial, subjects.PROMOTE_MODULE, PROMOTE))
    await two.until(lambda: two.orders == [ModuleOp.ACTIVATE])
    order = DirectModule(module="m", version="1", op=ModuleOp.ACTIVATE, user="ada")
    await ask(dial, subjects.DIRECT_MODULE, order)
    two.answers.set()
    assert (await promoting).version == "2"
    assert one.orders == [ModuleOp.ACTIVATE], "what the promotion still had to order counts no more"
    kept = await (await dial("reader")).bucket(subjects.MODULE_RECORD).entries()
    assert list(kept) == []
    with pytest.raises(Conflict, match="nothing of m was promoted"):
        await ask(dial, subjects.ROLL_BACK_MODULE, RollBackModule(module="m", user="ada"))
    assert not running.done()


async def test_orders_and_counts_outlive_the_orchestrator(dial: Dial, start: Start) -> None:
    first = await orchestrator(dial, start)
    before = Version(await dial("m-before", EntityKind.FUNCTIONAL_MODULE), "1", ModuleState.ACTIVE)
    await before.start()
    for op in (ModuleOp.SHADOW, ModuleOp.DISABLE):
        jobs = ("j",) if op is ModuleOp.DISABLE else ()
        order = DirectModule(module="m", version="1", op=op, jobs=jobs, user="ada")
        await ask(dial, subjects.DIRECT_MODULE, order)
    first.cancel()
    await asyncio.wait({first})
    await orchestrator(dial, start)
    after = Version(await dial("m-after", EntityKind.FUNCTIONAL_MODULE), "1", ModuleState.ACTIVE)
    await after.start()  # it crashed meanwhile, and was started as the first time
    await after.until(lambda: after.state is ModuleState.SHADOW and after.without == ("j",))
    [status] = (await ask(dial, subjects.MODULE_QUERY, ModuleQuery())).modules
    assert (status.state, status.without, status.crashes) == (ModuleState.SHADOW, ("j",), 1)


async def test_a_module_that_runs_is_taken_over_by_nobody_elses_of_the_same_name(
    dial: Dial, start: Start, registry: ServiceRegistry
) -> None:
    await orchestrator(dial, start)
    mine = await dial("m", EntityKind.FUNCTIONAL_MODULE)
    record = service(
        "m", kind=EntityKind.FUNCTIONAL_MODULE, prefix="module/m", incarnation=mine.sender.incarnation
    )
    async with RegistrationClient(mine, record):
        one = Version(mine, "1", ModuleState.ACTIVE)
        await one.start()

        async def alive() -> bool:
            return (await ask(dial, subjects.MODULE_QUERY, ModuleQuery())).modules[0].alive

        await eventually(alive)  # the registry's word of it is still on its way
        theirs = one.lifecycle().model_copy(update={"owner": "ann"})
        with pytest.raises(Conflict, match="runs already, as m"):
            await mine.command(
                subjects.MODULE_LIFECYCLE, theirs, deadline_s=PATIENCE_S, owner="ann", module="m"
            )
        await one.tell()
