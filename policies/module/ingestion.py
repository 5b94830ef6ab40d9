"""The data ingestion interface of a functional module (draft §4.2, Figure 2): a bounded inbox of events.

Live events come on the rows that the policy subscribes to. After a start come the same rows' last minutes
from their streams, the registry's snapshot, and the jobs' records.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.discovery import resolve
from bus.messaging.handlers import Subscription
from bus.subject_row import Subject
from policies.kit.engine import Event, Result
from policies.kit.policy import Policy
from policies.module.recent import recent
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.policy import PolicySuggestion
from schemas.registry import Resolve
from schemas.signals import RouteAdvertisement

log = get_logger("module")

MANY = 256
"""Number of events that begins a round at once."""
KNOWN_JOBS = 4_096
"""Most jobs whose correlation is remembered."""


class Ingestion:
    """One module's inbox.

    Args:
        bus: The module's connection.
        policy: The policy that gets the events.
        rows: Rows to subscribe to.
        queue: Most events that wait; beyond it the oldest are dropped and counted (`dropped`).
        gather_s: Seconds that an event may wait for others.
        is_urgent: Whether an event must not wait, since it may lead to a decision now.
        owner: The user in whose name it suggests.
        overlap_s: Time after a rebuild in which live events are compared with the events read: they may be
            the same.
    """

    def __init__(
        self,
        bus: Bus,
        policy: Policy,
        rows: tuple[Subject, ...],
        queue: int,
        gather_s: float,
        is_urgent: Callable[[Event | Result, float], bool],
        owner: str,
        *,
        overlap_s: float = 5.0,
    ) -> None:
        self._overlap_s = overlap_s
        self.dropped = 0
        self._news = asyncio.Event()
        self._gather_s = gather_s
        self._is_urgent = is_urgent
        self._urgent = False
        self._oldest = 0.0  # time.monotonic() of the first waiting event
        self._bus = bus
        self._policy = policy
        self._owner = owner
        self._rows = rows
        self._queue = queue
        self._waiting: deque[Event | Result] = deque()
        self._correlations: dict[str, str] = {}
        self._rebuilt: set[str] = set()
        self._rebuilt_until = 0.0

    def correlation(self, job: str) -> str | None:
        """The correlation of the job's request, once a message with it has come."""
        return self._correlations.get(job)

    def _remember_correlation(self, message: Message, envelope: Envelope) -> None:
        job = getattr(message, "job", None)
        if envelope.correlation is None or not job or self._correlations.get(job) == envelope.correlation:
            return
        if len(self._correlations) >= KNOWN_JOBS:
            self._correlations.clear()
        self._correlations[job] = envelope.correlation

    def hurry(self) -> None:
        """Begins a round at once, whatever events wait."""
        self._urgent = True
        self._news.set()

    async def until_worth_a_round(self, due: Callable[[], float | None]) -> None:
        """Returns once a round is worth its cost.

        That is so if an urgent event waits, an event has waited for `gather_s`, `MANY` events wait, or a
        decision is due.

        Args:
            due: Seconds until a decision is due, by the events taken in so far; None: none is.
        """
        while True:
            self._news.clear()
            delays_s = [] if (due_s := due()) is None else [due_s]
            if self._waiting:
                delays_s.append(self._oldest + self._gather_s - time.monotonic())
            if self._urgent or len(self._waiting) >= MANY or min(delays_s, default=1.0) <= 0:
                await asyncio.sleep(0)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(delays_s, default=None)):
                    await self._news.wait()

    async def subscribe(self) -> list[Subscription]:
        """Questions about faults are no events here: `FaultAnswers` hears them."""
        rows = (row for row in self._rows if row is not subjects.FAULT_QUESTION)
        return [await self._bus.subscribe(row, self._handler(row)) for row in rows]

    def put(self, event: Event | Result) -> None:
        """Adds an event; drops the oldest one if the inbox is full."""
        if len(self._waiting) >= self._queue:
            self._waiting.popleft()
            self.dropped += 1
            if self.dropped == 1:
                log.warning(
                    "the policy is slower than the telemetry, the oldest is dropped",
                    module=self._policy.name,
                    queue=self._queue,
                )
        if not self._waiting:
            self._oldest = time.monotonic()
            self._news.set()
        self._waiting.append(event)
        if not self._urgent and self._is_urgent(event, time.time()):
            self.hurry()
        elif len(self._waiting) == MANY:
            self._news.set()

    def drained(self) -> list[Event | Result]:
        """Takes all waiting events, without those that the rebuild has read already."""
        events = list(self._waiting)
        self._waiting.clear()
        self._urgent = False
        if self._rebuilt and time.monotonic() > self._rebuilt_until:
            self._rebuilt = set()
        return [event for event in events if event.id not in self._rebuilt] if self._rebuilt else events

    async def history(self, since: float, answer_s: float) -> list[Event]:
        """The events before a module's start, in order; those that can't be read are skipped with a warning.

        Args:
            since: Seconds since the epoch.
            answer_s: Seconds that the registry may take.
        """
        events: list[Event] = []
        try:
            for row in self._rows:
                if row.stream is not None:
                    events += [_event(row, *item) for item in await self._recent(row, since)]
            suggestions = await self._recent(
                subjects.SUGGESTION, since, owner=self._owner, module=self._policy.name
            )
            events += [_event(subjects.SUGGESTION, *item) for item in suggestions if self._is_own(item[0])]
        except DmscError as error:
            log.warning("history not read, starting without", module=self._policy.name, reason=error.text)
        events.sort(key=lambda event: event.at)
        events += await self._jobs(events)
        with contextlib.suppress(DmscError):  # the next full advertisement brings the same records
            reply = await resolve(self._bus, Resolve(), timeout_s=answer_s)
            snapshot = RouteAdvertisement(
                revision=reply.revision, previous=reply.revision, full=True, changed=reply.records
            )
            events.append(Event(row=subjects.ADVERTISEMENT, message=snapshot, id="snapshot", at=time.time()))
        self._rebuilt = {event.id for event in events}
        self._rebuilt_until = time.monotonic() + self._overlap_s
        return events

    async def _recent(self, row: Subject, since: float, **tokens: str) -> list[tuple[Message, Envelope]]:
        return [(item.message, item.envelope) for item in await recent(self._bus, row, since, **tokens)]

    async def _jobs(self, events: list[Event]) -> list[Event]:
        """The records of these events' jobs, whose state may be older than the last minutes."""
        bucket = self._bus.bucket(subjects.JOB_RECORD)
        jobs = {job for event in events if (job := getattr(event.message, "job", None))}
        records = []
        for job in sorted(jobs):
            try:
                entry = await bucket.get(job=job)
            except DmscError as error:
                log.warning("job record not read", module=self._policy.name, job=job, reason=error.text)
                break
            if entry is not None:
                if entry.message.correlation:
                    self._correlations[job] = entry.message.correlation
                records.append(
                    Event(row=subjects.JOB_RECORD, message=entry.message, id=f"record {job}", at=time.time())
                )
        return records

    def _is_own(self, message: Message) -> bool:
        return isinstance(message, PolicySuggestion) and message.version == self._policy.version

    def _handler(self, row: Subject) -> Callable[[Message, Envelope], Awaitable[None]]:
        async def take(message: Message, envelope: Envelope) -> None:
            self._remember_correlation(message, envelope)
            self.put(Event(row=row, message=message, id=envelope.id, at=time.time()))

        return take


def _event(row: Subject, message: Message, envelope: Envelope) -> Event:
    return Event(row=row, message=message, id=envelope.id, at=envelope.sent_at)
