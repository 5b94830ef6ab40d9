"""The wanted capacity on the bus: at once, on change, and by whoever leads next."""

from __future__ import annotations

import asyncio

from bus import subjects
from entities.orchestrator.queue.capacity_signal import CapacitySignal, CapacitySignalConfig
from schemas.envelope import EntityKind, Envelope
from schemas.machines.demand import MachineDemand
from schemas.queue import QueueCapacity
from tests.integration.entities.conftest import Dial
from tests.patience import PATIENCE_S


async def test_what_lacks_is_told_at_once_on_change_and_by_a_new_leader(dial: Dial) -> None:
    lacking = 0
    heard: asyncio.Queue[int] = asyncio.Queue()
    looked = asyncio.Event()

    async def hear(message: QueueCapacity, envelope: Envelope) -> None:
        await heard.put(message.lacking)

    async def next_heard() -> int:
        return await asyncio.wait_for(heard.get(), PATIENCE_S)

    listener = await dial("autoscaler", EntityKind.CLIENT)
    subscription = await listener.subscribe(subjects.QUEUE_CAPACITY, hear)

    async def present() -> tuple[QueueCapacity, MachineDemand]:
        return QueueCapacity(slots=2, free=0, waiting=1, lacking=lacking), MachineDemand(more=lacking)

    orchestrator = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    signal = CapacitySignal(orchestrator, present, looked, CapacitySignalConfig(least_s=0.1))
    leading = asyncio.create_task(signal.run())
    assert await next_heard() == 0
    lacking = 5
    looked.set()
    assert await next_heard() == 5
    leading.cancel()
    await asyncio.wait({leading})
    leading = asyncio.create_task(signal.run())
    assert await next_heard() == 5
    leading.cancel()
    await asyncio.wait({leading})
    await subscription.stop()
