"""The wanted capacity on the bus: at once, on change, and by whoever leads next."""

from __future__ import annotations

import asyncio

from bus import subjects
from entities.orchestrator.queue.capacity_signal import CapacitySignal, CapacitySignalConfig
from schemas.envelope import EntityKind, Envelope
from schemas.machines.demand import MachineDemand
from schemas.queue import QueueCapacity
from tests.integration.entities.conftest import Dial
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually


async def test_what_lacks_is_told_at_once_on_change_and_by_a_new_leader(dial: Dial) -> None:
    lacking = 0
    heard: asyncio.Queue[int] = asyncio.Queue()

    async def hear(message: QueueCapacity, envelope: Envelope) -> None:
        await heard.put(message.lacking)

    async def next_heard() -> int:
        return await asyncio.wait_for(heard.get(), PATIENCE_S)

    listener = await dial("autoscaler", EntityKind.CLIENT)
    subscription = await listener.subscribe(subjects.QUEUE_CAPACITY, hear)

    class Queue:
        looked = asyncio.Event()

        def settled(self) -> bool:
            return True

        async def capacity(self) -> tuple[QueueCapacity, MachineDemand]:
            return QueueCapacity(slots=2, free=0, waiting=1, lacking=lacking), MachineDemand(more=lacking)

    queue = Queue()
    orchestrator = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    config = CapacitySignalConfig(least_s=0.1)
    signal = CapacitySignal(orchestrator, queue, config)
    leading = asyncio.create_task(signal.run())
    assert await next_heard() == 0
    lacking = 5
    queue.looked.set()
    assert await next_heard() == 5
    leading.cancel()
    await asyncio.wait({leading})
    leading = asyncio.create_task(signal.run())
    assert await next_heard() == 5
    leading.cancel()
    await asyncio.wait({leading})
    await subscription.stop()


async def test_a_new_leader_tells_no_machine_demand_before_it_has_heard_of_all_nodes(dial: Dial) -> None:
    heard, capacities = list[MachineDemand](), asyncio.Queue[QueueCapacity]()
    complete = False

    async def hear(message: MachineDemand, envelope: Envelope) -> None:
        heard.append(message)

    async def hear_capacity(message: QueueCapacity, envelope: Envelope) -> None:
        await capacities.put(message)

    listener = await dial("provisioner", EntityKind.PROVISIONER)
    await listener.subscribe(subjects.MACHINE_DEMAND, hear)
    autoscaler = await dial("autoscaler", EntityKind.CLIENT)
    await autoscaler.subscribe(subjects.QUEUE_CAPACITY, hear_capacity)

    class Queue:
        looked = asyncio.Event()

        def settled(self) -> bool:
            return complete

        async def capacity(self) -> tuple[QueueCapacity, MachineDemand]:
            lacking = 0 if complete else 2
            return QueueCapacity(slots=2, free=0, waiting=1, lacking=lacking), MachineDemand(more=lacking)

    queue = Queue()
    orchestrator = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    config = CapacitySignalConfig(least_s=0.01, settle_s=NEVER_S)
    leading = asyncio.create_task(CapacitySignal(orchestrator, queue, config).run())
    first = await asyncio.wait_for(capacities.get(), PATIENCE_S)
    assert first.lacking == 2
    complete = True
    queue.looked.set()
    await eventually(lambda: heard)
    assert [message.more for message in heard] == [0]
    leading.cancel()
    await asyncio.wait({leading})
