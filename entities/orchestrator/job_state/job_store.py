"""A job's record and its events: every transition is checked, kept, and told, in this order.

The record in the bucket is the truth; the stream of events is what people and curves follow.
Each write names the revision of the one before, so that nobody overwrites the record of a newer epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import JOB_EVENT, JOB_RECORD, JOB_TOPOLOGY
from schemas.errors import BusUnreachable, Conflict, Fenced, IllegalTransition, Unavailable
from schemas.job import ENDED, JOB_TRANSITIONS, JobEvent, JobRecord, JobState
from schemas.task_graph import JobTopology, TaskGraph

log = get_logger("orchestrator")

HISTORY = 50
"""State changes kept in a job's record."""

WRITE_RETRY_S = 0.2
"""How often a record that the bus does not take is written again: until it does, for its disk may be full."""

RECORD_EVERY_S = 1.0
"""Figures of a running job are written at most this often; states at once. Events carry every step."""


class JobStore:
    """Writes one job's record and events.

    `revision` is of the record that this one follows; 0: there is none. Every call that writes raises
    `Fenced` once another epoch has the record, and `NewerRecord` once one of a version stands there that this
    software does not read: then its orchestrator has to stop leading. `confirmed` returns while that surely
    leads: then nobody else can have written, and what was removed or can't be read is written again.
    """

    def __init__(
        self,
        bus: Bus,
        record: JobRecord,
        revision: int = 0,
        confirmed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._bus = bus
        self._bucket = bus.bucket(JOB_RECORD)
        self._revision = revision
        self.confirmed = confirmed
        self._lock = asyncio.Lock()
        self.record = record
        self._written_at = 0.0
        self._told_graph: TaskGraph | None = None

    @property
    def job(self) -> str:
        return self.record.job

    def begin_epoch(self) -> None:
        """For whoever takes the job up in this process: the next write fences the instances before.

        The same journal, so that what is just being written stays in order with what follows.
        """
        self.record = self.record.model_copy(update={"epoch": self.record.epoch + 1})

    async def move(
        self, state: JobState, reason: str = "", *, plan_s: float | None = None, **figures: Any
    ) -> None:
        """The job enters `state`; `plan_s`: its plan took that long.

        Raises:
            IllegalTransition: with the history, if its table forbids it.
        """
        before = self.record.state
        if state is not before and state not in JOB_TRANSITIONS[before]:
            raise IllegalTransition(
                f"job {self.job}: {before} → {state} (history: {' | '.join(self.record.history)})"
            )
        line = f"{state}: {reason}" if reason else str(state)
        self.record = self.record.model_copy(
            update={
                "state": state,
                "reason": reason,
                "changed_at": time.time(),
                "history": (*self.record.history, line)[-HISTORY:],
                **figures,
            }
        )
        await self._write()
        log.info("job", job=self.job, state=str(state), reason=reason)
        await self.tell(
            "state", text=reason, state=state, total_steps=self.record.spec.training.steps, plan_s=plan_s
        )

    async def reason(self, reason: str) -> None:
        """Says why the job stays where it is (a queued one: what it waits for); told once."""
        if reason != self.record.reason:
            await self.move(self.record.state, reason)

    async def note(self, *, now: bool = False, **figures: Any) -> None:
        """Keeps figures in the record without a change of state."""
        self.record = self.record.model_copy(update=figures)
        if now or time.monotonic() - self._written_at > RECORD_EVERY_S:
            await self._write()

    async def tell(self, kind: str, **fields: Any) -> None:
        """Appends an event to the job's stream."""
        event = JobEvent.model_validate({"job": self.job, "kind": kind, "at": time.time(), **fields})
        await self._bus.append(JOB_EVENT, event, deadline_s=math.inf, job=self.job)

    async def confirm(self) -> None:
        """Asks the bucket whether the record is still this epoch's.

        Raises:
            Fenced, NewerRecord: it is not.
            Unavailable: not known.
        """
        async with self._lock:
            await self._find_own()

    async def _write(self) -> None:
        """The bus may be away for a while: a running job must not end of that."""
        self._written_at = time.monotonic()
        async with self._lock:
            unknown = False  # whether a write of ours may have arrived without our knowing
            while True:
                try:
                    if unknown:
                        await self._find_own()
                    self._revision = await self._put()
                    break
                except Conflict:
                    unknown = True
                except Unavailable:
                    unknown = True
                    await asyncio.sleep(WRITE_RETRY_S)
        await self._tell_topology()

    async def _tell_topology(self) -> None:
        """Functional modules hear of a new graph; whoever misses it finds it in the record."""
        graph = self.record.graph
        if graph is None or graph is self._told_graph:
            return
        self._told_graph = graph
        message = JobTopology(job=self.job, epoch=self.record.epoch, graph=graph)
        with contextlib.suppress(BusUnreachable):
            await self._bus.publish(JOB_TOPOLOGY, message, job=self.job)

    async def _put(self) -> int:
        if self._revision:
            return await self._bucket.update(self.record, revision=self._revision, job=self.job)
        return await self._bucket.create(self.record, job=self.job)

    async def _find_own(self) -> None:
        """Goes on from what stands in the bucket, if it is the revision we know, or our own later writing."""
        entry = await self._bucket.get(leader=True, job=self.job)
        found = await self._bucket.revision(job=self.job) if entry is None else entry.revision
        if found == self._revision:
            return
        if (entry is None or entry.stale) and self.confirmed is not None:
            await self.confirmed()
            log.error("job record written again", job=self.job, why="unreadable" if found else "removed")
            self._revision = found
            return
        if entry is not None:
            ours = (self.record.epoch, self._bus.sender.incarnation)
            if (entry.message.epoch, entry.envelope.sender.incarnation) == ours:
                self._revision = entry.revision
                return
        raise Fenced(f"the record of job {self.job} is another orchestrator's now (revision {found})")

    @property
    def ended(self) -> bool:
        return self.record.state in ENDED
