"""Log shipping: publishes the log lines that `bus.logs` has kept, within bounds."""

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
    """Publishes this process's lines (info and above by default) on `subjects.LOG` until cancelled.

    If several services share the process (`bind(service=…)`), it publishes the lines of `bus.sender.name`,
    and with `unowned` also those of services that do not ship their own. Queues are bounded: in a flood,
    lines are dropped, and a line of its own reports their number. While the bus is away, lines are kept up to
    the bound.
    """
    name = bus.sender.name
    services = (name, "") if unowned else (name,)
    own_sending.set(True)  # of this task alone
    stand_alone()
    shipping.shippers[name] += 1
    try:
        while True:
            await _ship(bus, services)
            await asyncio.sleep(every_s)
    finally:
        shipping.shippers[name] -= 1
        if not shipping.shippers[name]:
            del shipping.shippers[name]
        await _ship(bus, services)


async def _ship(bus: Bus, services: tuple[str, ...]) -> None:
    if not bus.connected:
        return
    if shipping.dropped and "" in services:
        count, shipping.dropped = shipping.dropped, 0
        report = LogLine(level="warning", event="log lines dropped", fields={"count": str(count)})
        shipping.waiting.setdefault("", deque(maxlen=KEPT_LINES)).append(report)
    for service in services:
        lines = shipping.waiting.get(service, deque())
        try:
            while lines:
                await bus.publish(subjects.LOG, lines[0], sid=bus.sender.name)
                lines.popleft()
        except Unavailable:
            return  # the line is kept until the bus is back
        except BadMessage:
            lines.popleft()  # one line that cannot be encoded must not block the others
