"""The fault queue (reference 3, exception task queue): each fault from report to end, with its limits.

`FaultBook` is the queue's state, pure: what failed, how often, and how it ended. `FaultQueue` writes it to
the stream `FAULT_QUEUE`; no caller waits for that, so that a bus that is away delays no recovery.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from schemas.errors import DmscError, IllegalTransition, Unavailable
from schemas.fault import (
    FAULT_OVER,
    FAULT_TRANSITIONS,
    FaultKind,
    FaultRecord,
    FaultState,
    FaultTask,
    FaultVerdict,
)

log = get_logger("orchestrator")

NO_JOB = "mesh"
"""Takes the place of the job in the subject of a fault that belongs to no job."""

LOG_LINES, LOG_COLUMNS = 20, 400
"""Most lines of evidence and logs in a record (the latest), and most characters of each line."""

RETRIES: dict[FaultKind, int] = {
    "instance": 6,
    "link": 6,
    "unreachable": 6,
    "request": 6,
    "node": 6,
    "entity": 6,
    "slow": 6,
    "stalled": 6,
    "microbatch": 1,
    "device": 0,
}
"""How often one task may be tried again after failures of a kind. A microbatch gets one other incarnation."""

OF_INSTANCES = ("instance", "link", "unreachable", "request", "slow", "stalled")
"""Kinds of one instance, which are called `instance`, or `node`, once it is judged lost."""

Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class FaultQueueConfig:
    """Bounds of the queue."""

    retries: dict[FaultKind, int] = field(default_factory=lambda: dict(RETRIES))
    pending: int = 4096  # records that wait for the bus; further ones are dropped, and counted
    append_s: float = 30.0  # deadline of writing one record to the stream; then it is tried again


class FaultBook:
    """The faults that are not over yet, by id. Pure: ids and the time come in.

    If a task fails again in the same way, that is another attempt of the same fault; several reports about
    one attempt count once.
    """

    def __init__(self, retries: dict[FaultKind, int]) -> None:
        self._retries = retries
        self._open: dict[str, FaultRecord] = {}
        self._by_task: dict[Key, str] = {}

    def opened(
        self, id: str, kind: FaultKind, task: FaultTask, *, reporter: str, log: Iterable[str], now: float
    ) -> FaultRecord:
        """Opens a fault; returns its record, or that of an open fault of the same task and kind."""
        record = self._open.get(self._by_task.get(_key(kind, task), ""))
        if record is None and kind != "microbatch":
            record = self._same_end(task)
        if record is None:
            record = FaultRecord(
                id=id,
                state=FaultState.OPEN,
                kind=kind,
                task=task,
                reporter=reporter,
                log=_lines(log),
                limit=self._retries[kind],
                opened_at=now,
                changed_at=now,
            )
            self._by_task[_key(kind, task)] = id
            return self._keep(record)
        again = (record.task.attempt, record.task.incarnation) != (task.attempt, task.incarnation)
        changes: dict[str, Any] = {
            "log": _lines((*record.log, *(line for line in log if line not in record.log))),
            "changed_at": now,
        }
        if again:
            changes |= {"attempts": record.attempts + 1, "task": task, "reporter": reporter}
            return self._move(record, FaultState.OPEN, changes)
        return self._keep(record.model_copy(update=changes))

    def inherit(self, record: FaultRecord, now: float) -> FaultRecord | None:
        """Takes over a fault that an earlier orchestrator left open, with its count; its job goes on.

        Returns None if the same task has failed here already: then only that fault counts.
        """
        key = _key(record.kind, record.task)
        if key in self._by_task or record.id in self._open:
            return None
        self._by_task[key] = record.id
        changes = {"action": "another orchestrator leads: it is tried again", "changed_at": now}
        if record.state is FaultState.RETRYING:
            return self._keep(record.model_copy(update=changes))
        return self._move(record, FaultState.RETRYING, changes)

    def _same_end(self, task: FaultTask) -> FaultRecord | None:
        """The open fault of the same incarnation in the same attempt, of whichever kind and reporter."""
        end = (task.sid, task.incarnation, task.attempt)
        if task.incarnation is None:
            return None
        for record in self._open.values():
            if (record.task.sid, record.task.incarnation, record.task.attempt) == end:
                return record
        return None

    def located(self, id: str, verdict: FaultVerdict, now: float) -> FaultRecord | None:
        """Notes the verdict of the registry and the node agent. None: the fault is over."""
        record = self._open.get(id)
        if record is None:
            return None
        kind = record.kind
        if verdict.verdict == "structural" and kind in OF_INSTANCES:
            kind = "node" if verdict.scope == "node" else "instance"  # a link breaks with its instance
        changes: dict[str, Any] = {
            "kind": kind,
            "verdict": verdict.verdict,
            "scope": verdict.scope,
            "reason": verdict.reason,
            "judged": (record.verdict == "structural" and record.judged) or verdict.judged or record.judged,
            "action": verdict.action,
            "log": _lines((*record.log, *(line for line in verdict.log if line not in record.log))),
            "changed_at": now,
        }
        if record.state is FaultState.OPEN:
            return self._move(record, FaultState.LOCATED, changes)
        return self._keep(record.model_copy(update=changes))  # the recovery was faster

    def moved(self, id: str, state: FaultState, action: str, now: float) -> FaultRecord | None:
        """Notes a new state and the action taken. None: the fault is over."""
        record = self._open.get(id)
        if record is None:
            return None
        changes = {"action": action or record.action, "changed_at": now}
        if record.state is state:
            return self._keep(record.model_copy(update=changes))
        return self._move(record, state, changes)

    def exhausted(self, id: str) -> bool:
        """Whether the task has failed more often than the limit allows."""
        record = self._open.get(id)
        return record is not None and record.attempts > record.limit

    def of_job(self, job: str) -> list[FaultRecord]:
        """The job's faults that are not over, oldest first."""
        return [record for record in self._open.values() if record.task.job == job]

    def get(self, id: str) -> FaultRecord | None:
        return self._open.get(id)

    def _move(self, record: FaultRecord, state: FaultState, changes: dict[str, Any]) -> FaultRecord:
        if state is not record.state and state not in FAULT_TRANSITIONS[record.state]:
            raise IllegalTransition(f"fault {record.id}: {record.state} → {state} is not allowed")
        return self._keep(record.model_copy(update={**changes, "state": state}))

    def _keep(self, record: FaultRecord) -> FaultRecord:
        if record.state in FAULT_OVER:
            self._open.pop(record.id, None)
            self._by_task = {key: id for key, id in self._by_task.items() if id != record.id}
        else:
            self._open[record.id] = record
        return record


class FaultQueue:
    """The fault book, and writing it to the stream. All calls on the event loop; none but `run` waits."""

    def __init__(
        self,
        bus: Bus,
        config: FaultQueueConfig = FaultQueueConfig(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._config = config
        self._clock = clock
        self._book = FaultBook(config.retries)
        self._pending: asyncio.Queue[FaultRecord] = asyncio.Queue(config.pending)
        self.dropped = 0

    def opened(self, kind: FaultKind, task: FaultTask, *, reporter: str, log: Iterable[str] = ()) -> str:
        """Opens a fault; returns its id, or that of an open fault of the same task and kind."""
        id = f"f{secrets.token_hex(5)}"
        record = self._book.opened(id, kind, task, reporter=reporter, log=log, now=self._clock())
        self._write(record)
        return record.id

    def located(self, id: str, verdict: FaultVerdict) -> None:
        """Notes the verdict of the registry and the node agent."""
        self._write(self._book.located(id, verdict, self._clock()))

    def retrying(self, id: str, action: str) -> None:
        """The task is being tried again."""
        self._write(self._book.moved(id, FaultState.RETRYING, action, self._clock()))

    def handled(self, id: str, action: str = "") -> None:
        """Ends a fault: the task succeeded, or is no longer wanted."""
        self._write(self._book.moved(id, FaultState.HANDLED, action, self._clock()))

    def given_up(self, id: str, action: str) -> None:
        """Ends a fault whose task was not done."""
        self._write(self._book.moved(id, FaultState.GIVEN_UP, action, self._clock()))

    def exhausted(self, id: str) -> bool:
        """Whether the task has failed more often than the limit allows."""
        return self._book.exhausted(id)

    def get(self, id: str) -> FaultRecord | None:
        """The record of a fault that is not over."""
        return self._book.get(id)

    def of_job(self, job: str) -> list[FaultRecord]:
        """The job's faults that are not over."""
        return self._book.of_job(job)

    def _write(self, record: FaultRecord | None) -> None:
        if record is None:
            return
        try:
            self._pending.put_nowait(record)
        except asyncio.QueueFull:
            self.dropped += 1
            if self.dropped == 1:
                log.error("fault records dropped: the bus takes none", fault=record.id)

    async def run(self, jobs: Collection[str] = ()) -> None:
        """Writes records until cancelled.

        First it takes over the open faults of `jobs`, which go on, from an earlier orchestrator, and ends all
        other open faults.
        """
        await self._take_over(jobs)
        while True:
            await self._append(await self._pending.get())

    async def _take_over(self, jobs: Collection[str]) -> None:
        left: dict[str, FaultRecord] = {}
        try:
            async for recorded in self._bus.history(subjects.FAULT_RECORD):
                if isinstance(recorded.message, FaultRecord):
                    left[recorded.message.id] = recorded.message
        except DmscError as error:
            log.warning("the fault queue could not be read", reason=str(error))
            return
        for record in left.values():
            if record.state in FAULT_OVER:
                continue
            now = self._clock()
            inherited = self._book.inherit(record, now) if record.task.job in jobs else None
            if inherited is not None:
                self._write(inherited)
                continue
            action = "another orchestrator leads"
            changes = {"state": FaultState.HANDLED, "action": action, "changed_at": now}
            await self._append(record.model_copy(update=changes))

    async def _append(self, record: FaultRecord) -> None:
        task = record.task
        while True:
            try:
                await self._bus.append(
                    subjects.FAULT_RECORD,
                    record,
                    deadline_s=self._config.append_s,
                    job=task.job or NO_JOB,
                    sid=task.sid or NO_JOB,
                )
                return
            except Unavailable as error:
                log.warning("fault record not written yet", fault=record.id, reason=str(error))
            except DmscError as error:
                log.error("fault record refused", fault=record.id, reason=str(error))
                return


def _key(kind: FaultKind, task: FaultTask) -> Key:
    """What makes two faults the same. A bad microbatch fails on any instance: its instance is left out."""
    if kind == "microbatch":
        return (kind, task.job, task.step, task.microbatch)
    return (kind, task.job, task.step, task.sid, task.device)


def _lines(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line[:LOG_COLUMNS] for line in lines if line)[-LOG_LINES:]
