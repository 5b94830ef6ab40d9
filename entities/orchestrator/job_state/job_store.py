"""A job's record and its events: every transition is checked, recorded and published, in this order.

The record in the bucket is the truth; people and plots follow the stream of events.
Each write names the revision of the write before, so that nobody overwrites the record of a newer epoch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import KeyValueEntry
from bus.subjects import JOB_EVENT, JOB_RECORD, JOB_TOPOLOGY
from entities.orchestrator.job_state.owned_record import OwnedRecord
from schemas.errors import BusUnreachable, IllegalTransition
from schemas.job import ENDED, JOB_TRANSITIONS, JobEvent, JobRecord, JobState
from schemas.task_graph import JobTopology, TaskGraph
from schemas.usage import slots_of

log = get_logger("orchestrator")

HISTORY = 50
"""State changes kept in a job's record."""
HOLDING = frozenset({JobState.DEPLOYING, JobState.RUNNING, JobState.RECOVERING, JobState.FINISHING})
"""States in which a job holds the slots of its graph."""


@dataclass(frozen=True, kw_only=True)
class JobStoreTimes:
    """When a job's record is written, in seconds."""

    retry_s: float = 0.2
    """Pause before a failed write is repeated, without a limit: the disk of the bus may be full."""
    record_every_s: float = 1.0
    """Shortest time between writes of a running job's figures; states are written at once, events every
    step."""


class JobStore:
    """Writes one job's record and events.

    `revision`: that of the present record; 0: there is none. Every call that writes raises `Fenced` once
    another epoch has the record, and `NewerRecord` once the record has a version that this software can't
    read: then its orchestrator has to stop leading. `confirmed` returns if this orchestrator surely leads:
    then nobody else can have written, and a record that was removed or can't be read is written again.
    """

    def __init__(
        self,
        bus: Bus,
        record: JobRecord,
        revision: int = 0,
        confirmed: Callable[[], Awaitable[None]] | None = None,
        times: JobStoreTimes = JobStoreTimes(),
    ) -> None:
        self._times = times
        self._bus = bus
        self.confirmed = confirmed
        self.record = record
        self._owned = OwnedRecord(
            bus.bucket(JOB_RECORD), {"job": record.job}, revision, self._is_ours, confirmed, times.retry_s
        )
        self._written_at = 0.0
        self._published_graph: TaskGraph | None = None

    @property
    def job(self) -> str:
        return self.record.job

    def begin_epoch(self) -> None:
        """Begins the job's next epoch in this process; the next write fences the instances of the last one.

        The store stays the same, so that a write that is under way stays in order with later ones.
        """
        self.record = self.record.model_copy(update={"epoch": self.record.epoch + 1})

    async def move(
        self, state: JobState, reason: str = "", *, plan_s: float | None = None, **figures: Any
    ) -> None:
        """Records and publishes that the job enters `state`. `plan_s`: seconds that its plan took.

        Raises:
            IllegalTransition: the table of transitions forbids it; the text has the history.
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
        self._count_usage()
        await self._write()
        log.info("job", job=self.job, state=str(state), reason=reason)
        await self.tell("state", text=reason, state=state, total_steps=self.record.last_step, plan_s=plan_s)

    async def reason(self, reason: str) -> None:
        """Records why the job stays in its state (what a queued job waits for), if the reason is new."""
        if reason != self.record.reason:
            await self.move(self.record.state, reason)

    async def note(self, *, now: bool = False, **figures: Any) -> None:
        """Changes figures in the record; writes them if `now`, or if the last write is old enough."""
        self.record = self.record.model_copy(update=figures)
        self._count_usage()
        if now or time.monotonic() - self._written_at > self._times.record_every_s:
            await self._write()

    def _count_usage(self) -> None:
        """Counts the slots that were held until now; the record has those that are held from now on."""
        record = self.record
        slots = slots_of(record.graph) if record.state in HOLDING else 0
        self.record = record.model_copy(update={"usage": record.usage.held(slots, time.time())})

    async def tell(self, kind: str, **fields: Any) -> None:
        """Appends an event to the job's stream."""
        event = JobEvent.model_validate({"job": self.job, "kind": kind, "at": time.time(), **fields})
        await self._bus.append(JOB_EVENT, event, deadline_s=math.inf, job=self.job)

    async def confirm(self) -> None:
        """Reads from the bucket whether the record still belongs to this epoch.

        Raises:
            Fenced, NewerRecord: it does not.
            Unavailable: the bus does not answer.
        """
        await self._owned.confirm()

    async def _write(self) -> None:
        """Writes the record; repeats that while the bus is away, which must not end a running job."""
        self._written_at = time.monotonic()
        await self._owned.write(lambda: self.record)
        await self._publish_topology()

    async def _publish_topology(self) -> None:
        """Publishes a new graph for functional modules; a module that misses it finds it in the record."""
        graph = self.record.graph
        if graph is None or graph is self._published_graph:
            return
        self._published_graph = graph
        message = JobTopology(job=self.job, epoch=self.record.epoch, graph=graph)
        with contextlib.suppress(BusUnreachable):
            await self._bus.publish(JOB_TOPOLOGY, message, job=self.job)

    def _is_ours(self, entry: KeyValueEntry) -> bool:
        ours = (self.record.epoch, self._bus.sender.incarnation)
        return (entry.message.epoch, entry.envelope.sender.incarnation) == ours

    @property
    def ended(self) -> bool:
        return self.record.state in ENDED
