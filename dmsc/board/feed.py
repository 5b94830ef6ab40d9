"""Keeps a board up to date: watches the route tables, hears samples and steps, asks a gateway for the mesh.

Nothing of the mesh waits for it: samples come by plain subscriptions without a queue group, and what comes
faster than it is taken is dropped here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from dmsc.board.board import STEPS, Board
from dmsc.client.async_client import AsyncClient
from dmsc.state.settings import BusAddress
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind, Envelope
from schemas.errors import DmscError
from schemas.job import ENDED, JobEvent, JobState
from schemas.telemetry import InstanceSample, NodeSample

PENDING = 4096
"""Samples that may wait to be looked at; more are dropped."""
LOOK_S = 2.0
"""How often the gateway is asked for the mesh."""
HEARD_S = 2.5
"""A single picture waits this long, at most, for everybody's next sample: they come once a second."""
LINKS_S = 6.5
"""… and so long where links are asked for: their figures come every five seconds if they do not change."""


@dataclass
class BoardFeed:
    """A board that is fed. `heard` is set whenever something has come."""

    board: Board
    heard: asyncio.Event

    async def settle(self, *, links: bool = False) -> None:
        """Returns once every instance of a table has said how it is (and its links), or after a while."""
        missing = self.board.unheard_links if links else self.board.unheard
        try:
            async with asyncio.timeout(LINKS_S if links else HEARD_S):
                while missing():
                    self.heard.clear()
                    await self.heard.wait()
        except TimeoutError:
            pass  # it is shown without a figure


@asynccontextmanager
async def board_feed(bus_address: BusAddress, client: AsyncClient) -> AsyncIterator[BoardFeed]:
    """A feed that is current with tables, mesh and the last steps when it is entered.

    Raises:
        BusUnreachable, Unavailable, Refused: the bus or the gateway does not let us in.
    """
    board, heard, current = Board(), asyncio.Event(), asyncio.Event()

    async def table(change: Change) -> None:
        if not change.key:
            current.set()
        else:
            job, cluster, stage = change.key.split(".")
            message = change.message if isinstance(change.message, RouteTable) else None
            board.take_table((job, cluster, int(stage)), message, time.time(), news=current.is_set())
            heard.set()

    async def instance(sample: InstanceSample, _: Envelope) -> None:
        board.take_sample(sample, time.time())
        heard.set()

    async def node(sample: NodeSample, _: Envelope) -> None:
        board.take_node(sample, time.time())
        heard.set()

    async def event(message: JobEvent, _: Envelope) -> None:
        board.take_event(message)
        heard.set()

    async with Bus.connect(
        bus_address.servers, name="board", kind=EntityKind.TAP, token=bus_address.token
    ) as bus:
        subscriptions = [
            await bus.subscribe(subjects.INSTANCE_SAMPLE, instance, pending_limit=PENDING),
            await bus.subscribe(subjects.NODE_SAMPLE, node, pending_limit=PENDING),
            await bus.subscribe(subjects.JOB_EVENT, event, pending_limit=PENDING),
        ]
        watch = await bus.bucket(subjects.ROUTE_TABLE).watch(table)
        looking = asyncio.create_task(_look(client, board, heard))
        try:
            board.take_mesh(await client.mesh())
            for summary in board.mesh.jobs if board.mesh else ():
                if JobState(summary.state) not in ENDED:
                    await _past_steps(bus, board, summary.job)
            await current.wait()
            yield BoardFeed(board, heard)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await watch.stop()
            for subscription in subscriptions:
                await subscription.stop()


async def _past_steps(bus: Bus, board: Board, job: str) -> None:
    """The last committed steps of a job, from the stream."""
    last: list[JobEvent] = []
    async for item in bus.history(subjects.JOB_EVENT, job=job):
        if isinstance(item.message, JobEvent) and item.message.result is not None:
            last = [*last[1 - STEPS :], item.message]
    for event in last:
        board.take_event(event)


async def _look(client: AsyncClient, board: Board, heard: asyncio.Event) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            board.take_mesh(await client.mesh())
            heard.set()
        except DmscError:
            continue  # away for a moment: what the bus tells goes on
