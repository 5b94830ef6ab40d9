"""Watches a running job: its events through a gateway, and its decisions on the bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from bus.connection import Bus
from bus.messaging.key_value import Change
from bus.subjects import STEP_CLAIM, STEP_DECISION
from bus.tasks import cancel
from dmsc.chaos.history import ComputedWork, Decided, count_work
from dmsc.client.async_client import AsyncClient
from schemas.job import ENDED, JobEvent, JobState
from schemas.step import MicrobatchClaim, StepDecision

OnEvent = Callable[[JobEvent], None]


class Watched:
    """A job under observation.

    `committed` is the number of committed steps, which a roll-back lowers. `standbys` has the SIDs of standby
    replicas.
    """

    def __init__(self, job: str, on_event: OnEvent) -> None:
        self.job = job
        self.events: list[JobEvent] = []
        self.decided: list[Decided] = []
        self.committed = 0
        self.standbys: frozenset[str] = frozenset()
        self._state: JobState | None = None
        self._on_event = on_event
        self._changed = asyncio.Event()
        self.ended = asyncio.Event()

    async def follow(self, client: AsyncClient) -> None:
        """Read the job's events until it has ended."""
        try:
            async for event in client.events(self.job):
                self.events.append(event)
                if event.result is not None:
                    self.committed = event.result.step + 1
                if event.instances is not None:
                    self.standbys = frozenset(view.sid for view in event.instances if view.standby)
                self._state = event.state or self._state
                self._changed.set()
                self._on_event(event)
        finally:
            self.ended.set()
            self._changed.set()

    async def reach(self, step: int) -> bool:
        """Wait until `step` steps are committed. Returns False if the job ended before."""
        while self.committed < step and not self.ended.is_set():
            self._changed.clear()
            await self._changed.wait()
        return self.committed >= step

    @property
    def training(self) -> bool:
        """Whether steps are under way; they are not once the job has ended or its weights are written."""
        over = self._state is JobState.FINISHING or self._state in ENDED
        return not over and not self.ended.is_set()

    async def decision(self, change: Change) -> None:
        """Handle a change in the bucket of decisions."""
        if isinstance(change.message, StepDecision):
            self.decided.append(Decided(step=change.message.step, at=time.time()))


@asynccontextmanager
async def watching(
    client: AsyncClient, bus: Bus, job: str, on_event: OnEvent = lambda _: None
) -> AsyncIterator[Watched]:
    """Watch a job in the background until the block ends. An error of the watching is raised at its end."""
    watched = Watched(job, on_event)
    decisions = await bus.bucket(STEP_DECISION).watch(watched.decision, job=job)
    following = asyncio.create_task(watched.follow(client), name=f"follow {job}")
    try:
        yield watched
        await following
    finally:
        await cancel(following)
        await decisions.stop()


async def work_of(bus: Bus, job: str) -> ComputedWork:
    """The work of a job, counted from all claims in the stream."""
    claims = []
    async for recorded in bus.history(STEP_CLAIM, job=job):
        if isinstance(recorded.message, MicrobatchClaim):
            claims.append(recorded.message)
    return count_work(claims)
