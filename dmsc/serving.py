"""Several services in one process: each its own connection and identity, one TaskGroup, an ordered stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bus.connection import Bus
from bus.logs import get_logger, ship_logs
from dmsc.composition import Part
from dmsc.interrupts import interrupts
from dmsc.parent_death import end_at_the_latest
from schemas.envelope import EntityKind
from schemas.errors import BusUnreachable, DmscError

STOP_LIMIT_S = 12.0
"""From the signal to the last resort. Longer than all drains, shorter than a container's patience."""

_stage_limit_s = 4.0
log = get_logger("run")


async def serve(
    parts: Sequence[Part],
    servers: Sequence[str],
    token: str | None,
    *,
    patience_s: float = 30.0,
    replicas: int | None = None,
) -> None:
    """Run these services until SIGTERM or SIGINT; then stop them in order of `stop_order`.

    Args:
        parts: what to run.
        servers: the bus.
        token: the bus's token.
        patience_s: how long to wait for a bus that is not there yet.
        replicas: of streams and buckets, which are made or adjusted first (idempotent); None: by others.
    """
    stopping = asyncio.Event()

    def stop(count: int) -> None:
        if count == 1:
            end_at_the_latest(STOP_LIMIT_S)
        stopping.set()

    with interrupts(stop):
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(_open(servers, token, parts, patience_s, replicas))
            stopped = group.create_task(stopping.wait())
            await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() or opening.exception():
                opening.cancel()
                stopped.cancel()
                return
            last = max(parts, key=lambda part: part.stop_order)
            tasks = {
                part.sid: group.create_task(_run(part, servers, token, ship=part is last), name=part.sid)
                for part in parts
            }
            await _until_over(stopped, list(tasks.values()))
            stopped.cancel()
            for order in sorted({part.stop_order for part in parts}):
                stage = [tasks[part.sid] for part in parts if part.stop_order == order]
                for task in stage:
                    task.cancel()
                _, late = await asyncio.wait(stage, timeout=_stage_limit_s)
                for task in late:
                    log.warning("slow to stop", service=task.get_name())


async def _open(
    servers: Sequence[str], token: str | None, parts: Sequence[Part], patience_s: float, replicas: int | None
) -> None:
    """Wait for the bus, and make what all services stand on."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            async with Bus.connect(servers, name=parts[0].sid, kind=parts[0].kind, token=token) as bus:
                if replicas is not None:
                    await bus.provision(replicas=replicas)
                return
        except BusUnreachable as error:
            if loop.time() >= deadline:
                raise
            log.info("waiting for the bus", reason=error.text)
            await asyncio.sleep(0.5)


async def _run(part: Part, servers: Sequence[str], token: str | None, *, ship: bool) -> None:
    """One service until it is cancelled. `ship`: this process's log lines travel over its connection."""
    async with Bus.connect(servers, name=part.sid, kind=part.kind, token=token) as bus:
        logs = asyncio.create_task(ship_logs(bus)) if ship else None
        try:
            await part.make(bus).run()
        finally:
            if logs is not None:
                logs.cancel()
                await asyncio.gather(logs, return_exceptions=True)
        if part.kind is not EntityKind.FUNCTIONAL_MODULE:  # which may be told to leave
            raise DmscError(f"{part.sid} ended by itself; see its log")


async def _until_over(stopped: asyncio.Task[bool], services: list[asyncio.Task[None]]) -> None:
    """Until the signal, or until all services have left in order."""
    left = asyncio.create_task(asyncio.wait(services))
    events: set[asyncio.Task[Any]] = {stopped, left}
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    left.cancel()
