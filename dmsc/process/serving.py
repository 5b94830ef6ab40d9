"""Runs several services in one process, each with its own connection, and stops them in order."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bus.connection import Bus
from bus.log_shipping import ship_logs
from bus.logs import bind, get_logger
from bus.scheduling_class import displace_nobody
from bus.tasks import background
from dmsc.metrics.exposition import Exposition
from dmsc.metrics.listener import MetricsOptions, listening
from dmsc.process.composition import LeavingEntity, ServicePart
from dmsc.process.interrupts import interrupts
from entities.metrics import Scraped
from schemas.envelope import EntityKind
from schemas.errors import BusUnreachable, DmscError

log = get_logger("run")


@dataclass(frozen=True, kw_only=True)
class ServingTimes:
    """The time limits of a process's start and end."""

    stop_s: float = 12.0
    """From the signal to a forced exit: longer than all drains, shorter than a container's timeout."""
    stage_s: float = 4.0
    """For the services that stop together."""
    dial_s: float = 5.0
    """For one attempt to reach the bus at the start."""


def tune_interpreter() -> None:
    """Sets what the interpreter does beside the services of this process.

    Messages of thousands of instances are small objects without cycles: with the default threshold of 700,
    searching for cycles takes a sixth of a busy registry's time. The middle generation is searched after
    50,000 objects: with 400,000 that held the loop of a leader with 10,000 jobs for 150 ms. While a thread
    decides or plans, each system call of the loop's thread waits for its next turn at most as long as a
    thread's turn: 1 ms, not 5.
    """
    gc.set_threshold(10_000, 5, 400)
    sys.setswitchinterval(0.001)


async def serve(
    parts: Sequence[ServicePart],
    servers: Sequence[str],
    token: str | None,
    *,
    patience_s: float = 30.0,
    replicas: int | None = None,
    metrics: MetricsOptions | None = None,
    grace_s: float = 0.0,
    times: ServingTimes = ServingTimes(),
) -> bool:
    """Run these services until SIGTERM or SIGINT, then stop them in `stop_order`.

    SIGTERM says that this machine goes away in `grace_s` seconds: services that can leave in order do so. A
    second signal, and any other one, ends them at once.

    Args:
        parts: The services to run.
        servers: The bus's addresses.
        token: The bus's token.
        patience_s: How long to wait for a bus that is not reachable yet.
        replicas: Copies of streams and buckets, which are created or adjusted first (idempotent). None:
            another process does that.
        metrics: Where this process serves its metrics. None: only its gateways' HTTP APIs do.
        grace_s: From SIGTERM until this process is killed. 0: SIGTERM ends it at once.
        times: The time limits.

    Returns:
        Whether a signal has ended it.
    """
    displace_nobody()
    stopping = asyncio.Event()
    leavers: list[LeavingEntity] = []

    def stop(count: int) -> None:
        if count == 1 and signals.last == signal.SIGTERM and grace_s and leavers:
            _end_at_the_latest(grace_s + times.stop_s)
            for leaver in leavers:
                leaver.leave(grace_s, "SIGTERM")
            return
        if not stopping.is_set():
            _end_at_the_latest(times.stop_s)
        stopping.set()

    with interrupts(stop) as signals:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            opening = group.create_task(
                _open(stack, servers, token, parts, patience_s, replicas, times.dial_s)
            )
            stopped = group.create_task(stopping.wait())
            await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() or opening.exception():
                opening.cancel()
                stopped.cancel()
                return signals.last is not None
            last = max(parts, key=lambda part: part.stop_order)
            async with _serving_metrics(metrics) as served:
                tasks = {
                    part.sid: group.create_task(
                        _run(part, servers, token, served, leavers, part is last), name=part.sid
                    )
                    for part in parts
                }
                await _until_stopped(stopped, list(tasks.values()))
                stopped.cancel()
                for order in sorted({part.stop_order for part in parts}):
                    stage = [tasks[part.sid] for part in parts if part.stop_order == order]
                    for task in stage:
                        task.cancel()
                    _, late = await asyncio.wait(stage, timeout=times.stage_s)
                    for task in late:
                        log.warning("slow to stop", service=task.get_name())
        return signals.last is not None


@dataclass(frozen=True, slots=True)
class _ProcessMetrics:
    """This process's metrics: the exposition that renders them, and their URL ('' if they have none)."""

    exposition: Exposition
    url: str = ""


@asynccontextmanager
async def _serving_metrics(options: MetricsOptions | None) -> AsyncIterator[_ProcessMetrics]:
    exposition = Exposition()
    if options is None:
        yield _ProcessMetrics(exposition)
        return
    async with listening(options, exposition.render) as url:
        log.info("metrics", url=url)
        yield _ProcessMetrics(exposition, url)


async def _open(
    stack: AsyncExitStack,
    servers: Sequence[str],
    token: str | None,
    parts: Sequence[ServicePart],
    patience_s: float,
    replicas: int | None,
    dial_s: float,
) -> None:
    """Enter the parts' `first` contexts on the stack, wait for the bus, and create streams and buckets."""
    for part in parts:
        if part.first is not None:
            await stack.enter_async_context(part.first())
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    # they may not create streams
    others = (
        EntityKind.FUNCTIONAL_MODULE,
        EntityKind.BROKER,
        EntityKind.ACCOUNTANT,
        EntityKind.MODEL_REGISTRY,
        EntityKind.PROVISIONER,
    )
    entities = [part for part in parts if part.kind not in others]
    first = (entities or parts)[0]
    while True:
        try:
            async with Bus.connect(
                servers,
                name=first.sid,
                kind=first.kind,
                token=token,
                connect_timeout_s=min(dial_s, patience_s),
            ) as bus:
                if replicas is not None and entities:
                    await bus.provision(replicas=replicas)
                return
        except BusUnreachable as error:
            if loop.time() >= deadline:
                raise
            log.info("waiting for the bus", reason=error.text)
            await asyncio.sleep(0.5)


async def _run(
    part: ServicePart,
    servers: Sequence[str],
    token: str | None,
    metrics: _ProcessMetrics,
    leavers: list[LeavingEntity],
    last: bool,
) -> None:
    """Run one service until it is cancelled, or has left. The `last` one also ships log lines of no service.

    One that can leave is among `leavers` while it runs.
    """
    bind(service=part.sid)
    async with Bus.connect(servers, name=part.sid, kind=part.kind, token=token) as bus:
        bus.metrics_url = metrics.url
        entity = part.make(bus)
        if isinstance(entity, Scraped):
            entity.exposition = metrics.exposition.render
        leaves = entity if isinstance(entity, LeavingEntity) else None
        if leaves is not None:
            leavers.append(leaves)
        metrics.exposition.add(bus, entity)
        async with background(ship_logs(bus, unowned=last)):
            try:
                await entity.run()
            finally:
                metrics.exposition.remove(entity)
                if leaves is not None:
                    leavers.remove(leaves)
        may_end = part.kind is EntityKind.FUNCTIONAL_MODULE or (leaves is not None and leaves.has_left)
        if not may_end:  # modules and agents may be ordered to leave
            raise DmscError(f"{part.sid} ended by itself; see its log")


async def _until_stopped(stopped: asyncio.Task[bool], services: list[asyncio.Task[None]]) -> None:
    """Wait for the signal, or until all services have ended by themselves."""
    all_ended = asyncio.create_task(asyncio.wait(services))
    events: set[asyncio.Task[Any]] = {stopped, all_ended}
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    all_ended.cancel()


def _end_at_the_latest(after_s: float) -> None:
    """Exit in `after_s` seconds even if something hangs, because a process that was told to stop must end."""

    def leave() -> None:
        print(f"dmsc: not stopped within {after_s:.0f} s, leaving", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(after_s, leave)
    timer.daemon = True
    timer.start()
