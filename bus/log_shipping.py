"""Log lines on their way to the bus: what `bus.logs` has kept of them is published, within bounds."""

from __future__ import annotations

import asyncio
from collections import deque

from bus import subjects
from bus.connection import Bus
from bus.logs import KEPT_LINES, own_sending, shipping
from bus.wire.correlation import stand_alone
from schemas.errors import BadMessage, Unavailable
from schemas.telemetry import LogLine


async def ship_logs(bus: Bus, *, every_s: float = 0.2, unowned: bool = True) -> None:
    """Publishes this process's lines (info and above, by default) on `subjects.LOG` until cancelled.

    Lines of the service `bus.sender.name`, where several are in one process (`bind(service=…)`), and with
    `unowned` those of nobody who ships. Queues are bounded: under a flood lines are dropped, and their number
    is told in a line of its own. Lines of a time without the bus are kept up to the bound.
    """
    name = bus.sender.name
    mine = (name, "") if unowned else (name,)
    own_sending.set(True)  # of this task alone
    stand_alone()
    shipping.shippers[name] += 1
    try:
        while True:
            await _ship(bus, mine)
            await asyncio.sleep(every_s)
    finally:
        shipping.shippers[name] -= 1
        if not shipping.shippers[name]:
            del shipping.shippers[name]
        await _ship(bus, mine)


async def _ship(bus: Bus, mine: tuple[str, ...]) -> None:
    if not bus.connected:
        return
    if shipping.dropped and "" in mine:
        count, shipping.dropped = shipping.dropped, 0
        told = LogLine(level="warning", event="log lines dropped", fields={"count": str(count)})
        shipping.waiting.setdefault("", deque(maxlen=KEPT_LINES)).append(told)
    for service in mine:
        waiting = shipping.waiting.get(service, deque())
        try:
            while waiting:
                await bus.publish(subjects.LOG, waiting[0], sid=bus.sender.name)
                waiting.popleft()
        except Unavailable:
            return  # kept for when the bus is back
        except BadMessage:
            waiting.popleft()  # one line that cannot be encoded must not block the others
