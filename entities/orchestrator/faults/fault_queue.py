"""The fault queue (reference 3, exception task queue): each fault from report to end, with its limits.

`FaultBook` is the queue's state, pure: what failed, how often, what became of it. `FaultQueue` keeps it on
the stream `FAULT_QUEUE`; nobody waits for that, so that a bus that is away delays no recovery.
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
"""Stands for the job in the subject of a fault that is of none."""

LOG_LINES, LOG_COLUMNS = 20, 400
"""What a record keeps of evidence and logs: the latest."""

RETRIES: dict[FaultKind, int] = {
    "instance": 6,
    "link": 6,
    "unreachable": 6,
    "request": 6,
    "node": 6,
    "entity": 6,
    "slow": 6,
    "microbatch": 1,
    "device": 0,
}
"""How often one task may fail in one way and be tried again. A microbatch gets one other incarnation."""

Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class FaultQueueConfig:
    """Bounds of the queue."""

    retries: dict[FaultKind, int] = field(default_factory=lambda: dict(RETRIES))
    pending: int = 4096  # records that wait for the bus; the newest are dropped beyond it, and counted
    append_s: float = 30.0  # one record's way to the stream, which repeats itself; then it is tried again


class FaultBook:
    """Faults that are not over yet, by id. Pure: ids and the time come in.

    A task that fails again in the same way is the same fault, once more; reports of one attempt count once.
    """

    def __init__(self, retries: dict[FaultKind, int]) -> None:
        self._retries = retries
        self._open: dict[str, FaultRecord] = {}
        self._by_task: dict[Key, str] = {}

    def opened(
        self, id: str, kind: FaultKind, task: FaultTask, *, reporter: str, log: Iterable[str], now: float
    ) -> FaultRecord:
        """A fault was seen; the record may be an older fault's, of the same task and kind."""
        held = self._open.get(self._by_task.get(_key(kind, task), ""))
        if held is None and kind != "microbatch":
            held = self._same_end(task)
        if held is None:
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
        again = (held.task.attempt, held.task.incarnation) != (task.attempt, task.incarnation)
        changes: dict[str, Any] = {
            "log": _lines((*held.log, *(line for line in log if line not in held.log))),
            "changed_at": now,
        }
        if again:
            changes |= {"attempts": held.attempts + 1, "task": task, "reporter": reporter}
            return self._move(held, FaultState.OPEN, changes)
        return self._keep(held.model_copy(update=changes))

    def inherit(self, record: FaultRecord, now: float) -> FaultRecord | None:
        """An orchestrator before this one left it open, and its job goes on: its tries count on.

        None: the same task has failed here already, and is counted from there.
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
        """What befell this incarnation in this attempt is one fault, whoever saw it and how."""
        end = (task.sid, task.incarnation, task.attempt)
        if task.incarnation is None:
            return None
        held = self._open.values()
        return next(
            (one for one in held if (one.task.sid, one.task.incarnation, one.task.attempt) == end), None
        )

    def located(self, id: str, verdict: FaultVerdict, now: float) -> FaultRecord | None:
        """The registry and the node agent were asked. None: the fault is over."""
        held = self._open.get(id)
        if held is None:
            return None
        kind = held.kind
        if verdict.verdict == "structural" and kind in ("instance", "link", "unreachable", "request", "slow"):
            kind = "node" if verdict.scope == "node" else "instance"  # a link breaks with who held it
        changes: dict[str, Any] = {
            "kind": kind,
            "verdict": verdict.verdict,
            "scope": verdict.scope,
            "reason": verdict.reason,
            "action": verdict.action,
            "log": _lines((*held.log, *(line for line in verdict.log if line not in held.log))),
            "changed_at": now,
        }
        if held.state is FaultState.OPEN:
            return self._move(held, FaultState.LOCATED, changes)
        return self._keep(held.model_copy(update=changes))  # the recovery was faster

    def moved(self, id: str, state: FaultState, action: str, now: float) -> FaultRecord | None:
        """Something was done about it. None: the fault is over."""
        held = self._open.get(id)
        if held is None:
            return None
        changes = {"action": action or held.action, "changed_at": now}
        if held.state is state:
            return self._keep(held.model_copy(update=changes))
        return self._move(held, state, changes)

    def exhausted(self, id: str) -> bool:
        """It was tried again as often as it may be, and failed again."""
        held = self._open.get(id)
        return held is not None and held.attempts > held.limit

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
    """The book, and its way to the stream. All calls on the event loop; none of them waits."""

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
        """A fault was seen; returns its id, which is an earlier one's if the same task failed like this
        before and was not brought to an end since."""
        id = f"f{secrets.token_hex(5)}"
        record = self._book.opened(id, kind, task, reporter=reporter, log=log, now=self._clock())
        self._write(record)
        return record.id

    def located(self, id: str, verdict: FaultVerdict) -> None:
        """What the registry and the node agent say about it."""
        self._write(self._book.located(id, verdict, self._clock()))

    def retrying(self, id: str, action: str) -> None:
        """The task is being tried again."""
        self._write(self._book.moved(id, FaultState.RETRYING, action, self._clock()))

    def handled(self, id: str, action: str = "") -> None:
        """It is over and done with: the task succeeded, or is no longer wanted."""
        self._write(self._book.moved(id, FaultState.HANDLED, action, self._clock()))

    def given_up(self, id: str, action: str) -> None:
        """It is over, and the task was not done."""
        self._write(self._book.moved(id, FaultState.GIVEN_UP, action, self._clock()))

    def exhausted(self, id: str) -> bool:
        """It has failed more often than its limit allows."""
        return self._book.exhausted(id)

    def get(self, id: str) -> FaultRecord | None:
        """A fault that is not over."""
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
        """Writes until cancelled. First takes over what an orchestrator before this one left open of these
        jobs, which go on, and ends the rest."""
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
    """What makes two faults the same: a microbatch fails wherever it runs, all else somewhere."""
    if kind == "microbatch":
        return (kind, task.job, task.step, task.microbatch)
    return (kind, task.job, task.step, task.sid, task.device)


def _lines(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line[:LOG_COLUMNS] for line in lines if line)[-LOG_LINES:]
