"""Works on this gateway's batches, and takes over those whose gateway is gone.

Two gateways may work on one batch for a moment, one of them frozen before: each unit is decided by the
creation of its row, so a request has one answer all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change
from bus.tasks import TaskSet, background
from entities.gateway.batches.batch_log import BatchLog
from entities.gateway.batches.batch_rules import files_of, is_forsaken, moved, next_batches, only_ends
from entities.gateway.batches.file_store import FileStore
from entities.gateway.batches.unit_work import LineConfig, UnitWork
from entities.patient_watch import watching
from schemas.errors import BadInput, DmscError, NotFound, Refused
from schemas.registry import ServiceRecord
from schemas.services.batches import BATCH_OVER, BatchRecord, BatchState

log = get_logger("batches")

S = BatchState


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many batches a gateway works on at a time, and how often it looks whether one needs it."""

    most: int = 4
    stuck_s: float = 30.0  # without a request under way: then a batch gives its place to one that waits
    units: int = 2  # of one batch, at a time: one ends while the next has begun
    look_s: float = 1.0  # between two looks at who is gone, while there are batches
    again_s: float = 2.0  # before a batch goes on whose work failed because the bus was away
    most_defects: int = 5  # failures of its work that are no errors of the mesh, after which a batch fails
    lines: LineConfig = field(default_factory=LineConfig)


class BatchRunner:
    """The batches of one gateway.

    Args:
        registry: The registry's records by SID; None while none are known.
        void: Why a batch's token counts no more; empty while it does.
    """

    def __init__(
        self,
        bus: Bus,
        batches: BatchLog,
        files: FileStore,
        work: UnitWork,
        registry: Callable[[], Mapping[str, ServiceRecord] | None],
        void: Callable[[BatchRecord], str],
        config: BatchConfig = BatchConfig(),
    ) -> None:
        self._bus = bus
        self._log = batches
        self._files = files
        self._work = work
        self._registry = registry
        self._void = void
        self._config = config
        self._records: dict[str, BatchRecord] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, asyncio.Event] = {}
        self._yielding: dict[str, asyncio.Event] = {}
        self._left: dict[str, float] = {}  # batches that gave their place back: when
        self._claims: set[str] = set()
        self._taken: set[str] = set()  # batches taken over, until they begin
        self._news = asyncio.Event()
        self._tasks = TaskSet()

    async def run(self) -> None:
        """Until cancelled; what is under way then is left to another gateway."""
        bucket = self._bus.bucket(subjects.BATCH)
        try:
            async with watching(bucket, self._changed, retry_s=self._config.again_s):
                while True:
                    self._news.clear()
                    self._look()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._config.look_s if self._records else None):
                            await self._news.wait()
        finally:
            await self._tasks.close()

    async def _changed(self, change: Change) -> None:
        if isinstance(change.message, BatchRecord) and change.message.state not in BATCH_OVER:
            record = self._records[change.message.batch] = change.message
            if record.state is S.CANCELLING and record.batch in self._ending:
                self._ending[record.batch].set()
        elif change.key:
            self._forget(change.key.partition(".")[2])
        self._news.set()

    def _look(self) -> None:
        """Leaves batches that another gateway has, begins own ones, takes over those of gateways gone."""
        registry, now = self._registry(), time.time()
        own = {record.batch: record for record in self._records.values() if self._is_mine(record)}
        forsaken: dict[str, BatchRecord] = {}
        for record in self._records.values():
            if record.batch in own:
                continue
            if (running := self._running.get(record.batch)) is not None:
                running.cancel()
            self._work.forget(record.batch)
            if registry is not None and is_forsaken(record, registry) and record.batch not in self._claims:
                forsaken[record.batch] = record
        may_begin: list[BatchRecord] = []
        for record in (*own.values(), *forsaken.values()):
            if record.batch in self._running or only_ends(record, now) or self._work.may_begin(record):
                may_begin.append(record)
            elif record.batch in forsaken:
                self._claim(record.batch)  # it takes no place, and somebody has to wait for its service
        most = self._config.most - len(self._claims)
        lost = forsaken.keys() | self._taken
        chosen = next_batches(may_begin, self._running.keys(), most, now, forsaken=lost, left=self._left)
        for record in chosen:
            if record.batch in forsaken:
                self._claim(record.batch)
            else:
                self._begin(record)
        begun = {record.batch for record in chosen} | self._running.keys()
        if any(record.batch not in begun for record in may_begin):
            self._free_a_place()

    def _free_a_place(self) -> None:
        """Has the batch yield to one that waits of which no request could begin for longest, if there is any.

        What it has answered so far is kept.
        """
        if any(event.is_set() for event in self._yielding.values()):
            return
        now = time.monotonic()
        stuck = {batch: self._work.stuck_s(batch, now) for batch in self._running}
        longest = max(stuck, key=stuck.__getitem__, default=None)
        if longest is not None and stuck[longest] >= self._config.stuck_s:
            self._yielding[longest].set()

    def _begin(self, record: BatchRecord) -> None:
        self._taken.discard(record.batch)
        self._ending[record.batch], self._yielding[record.batch] = asyncio.Event(), asyncio.Event()
        task = self._tasks.create(self._run_one(record), name=record.batch)
        self._running[record.batch] = task
        task.add_done_callback(partial(self._over, record.batch))

    def _is_mine(self, record: BatchRecord) -> bool:
        me = self._bus.sender
        return (record.gateway, record.incarnation) == (me.name, me.incarnation)

    def _over(self, batch: str, _: asyncio.Task[None]) -> None:
        self._running.pop(batch, None)
        self._ending.pop(batch, None)
        self._yielding.pop(batch, None)
        self._news.set()

    def _forget(self, batch: str) -> None:
        """It is over."""
        self._records.pop(batch, None)
        self._left.pop(batch, None)
        self._taken.discard(batch)
        self._work.forget(batch)

    def _claim(self, batch: str) -> None:
        if batch not in self._claims:
            self._claims.add(batch)
            task = self._tasks.create(self._take_over(batch), name=f"claim {batch}")
            task.add_done_callback(partial(self._claim_over, batch))

    def _claim_over(self, batch: str, _: asyncio.Task[None]) -> None:
        self._claims.discard(batch)
        self._news.set()

    async def _take_over(self, batch: str) -> None:
        me = self._bus.sender

        def claimed(record: BatchRecord) -> BatchRecord | None:
            registry = self._registry()
            if registry is None or not is_forsaken(record, registry):
                return None
            return record.model_copy(update={"gateway": me.name, "incarnation": me.incarnation})

        try:
            record = await self._log.change(batch, claimed)
        except DmscError as error:
            log.info("batch not taken over yet", batch=batch, code=error.code)
        else:
            if record is not None and self._is_mine(record):
                self._taken.add(batch)
                log.info("batch taken over", batch=batch)

    # --- one batch ------------------------------------------------------------------------------------------
    async def _run_one(self, record: BatchRecord) -> None:
        """Works on a batch until it is over, another gateway has it, or it gives its place back."""
        defects = 0
        while True:
            try:
                if defects < self._config.most_defects:
                    end = await self._until_end(record)
                else:
                    end = S.FAILED, "the gateway failed at its work; its log says why"
                if end is None:
                    log.info("batch waits: none of its requests can begin", batch=record.batch)
                    self._left[record.batch] = time.monotonic()
                    return
                ended = await self._end(record.batch, *end, enters=defects < 2 * self._config.most_defects)
                if ended is None or ended.state in BATCH_OVER:
                    self._forget(record.batch)
                return  # else another gateway has it
            except DmscError as error:
                log.info("batch goes on in a moment", batch=record.batch, code=error.code, error=error.text)
            except Exception as error:  # a defect must not have it begun again at once, or for ever
                defects += 1
                log.error("batch failed at its work", batch=record.batch, exc_info=error)
            await asyncio.sleep(self._config.again_s)
            record = self._records.get(record.batch, record)

    async def _until_end(self, record: BatchRecord) -> tuple[BatchState, str] | None:
        """How the batch ends, and why, once it does; None: its requests can't begin, and others wait.

        Raises:
            DmscError: the bus is away.
        """
        if record.state is S.FINALIZING:
            return S.COMPLETED, ""
        ending = self._ending[record.batch]
        if record.state is S.CANCELLING or ending.is_set():
            return S.CANCELLED, ""
        committed = {unit.unit for unit in await self._log.units(record.batch)}
        units = self._units(record, (unit for unit in range(record.units) if unit not in committed))
        left_s = max(0.0, record.expires_at - time.time())
        yielding = self._yielding[record.batch]
        async with (
            background(ending.wait()) as ended,
            background(yielding.wait()) as yielded,
            background(units) as work,
        ):
            events = {ended, yielded, work}
            await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                why = work.result()
                return (S.FAILED, why) if why else (S.COMPLETED, "")
            if ended.done():
                return S.CANCELLED, ""
            return None if yielded.done() else (S.EXPIRED, "its 24 hours were over")

    async def _units(self, record: BatchRecord, units: Iterable[int]) -> str:
        """Answers units until all are committed; returns why not, if they never will.

        Raises:
            DmscError: the bus is away.
        """
        room = asyncio.Semaphore(self._config.units)

        async def one(unit: int) -> None:
            try:
                made = await self._work.answered(record, unit)
                decided = await self._log.commit(made)
                self._work.committed(record, unit)
                if decided != made:
                    await self._work.drop(made, decided)
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as group:
                for unit in units:
                    await room.acquire()
                    if why := self._void(record):
                        raise Refused(why, user=record.user)
                    group.create_task(one(unit))
        except ExceptionGroup as failures:
            error = failures.exceptions[0]
            if isinstance(error, Refused | NotFound | BadInput):
                return error.text
            raise error from None
        return ""

    async def _end(self, batch: str, state: BatchState, why: str, *, enters: bool) -> BatchRecord | None:
        """Enters the files of the batch's answers, and then its end. Each step may come again.

        `enters`: else its files are given up, since entering them has failed too often.
        Returns the record as it is then; None: there is none.
        """
        units = await self._log.units(batch) if enters else []
        now = time.time()

        def finalized(record: BatchRecord) -> BatchRecord | None:
            is_next = self._is_mine(record) and record.state is S.IN_PROGRESS and state is S.COMPLETED
            return moved(record, S.FINALIZING, now) if is_next else None

        def ended(record: BatchRecord) -> BatchRecord | None:
            if not self._is_mine(record) or record.state in BATCH_OVER:
                return None
            last = S.CANCELLED if record.state is S.CANCELLING else state
            counts = {
                "completed": sum(unit.completed for unit in units),
                "failed": sum(unit.failed for unit in units),
            }
            return moved(record, last, now, error=why, **counts)

        record = await self._log.change(batch, finalized)
        if record is None or not self._is_mine(record) or record.state in BATCH_OVER:
            return record
        for file in files_of(record, units, now):
            await self._files.enter(file)
        # What a gateway that died has stored, and not decided, would count in the user's quota for ever.
        if enters:
            await self._files.sweep(record, units)
        record = await self._log.change(batch, ended)
        if record is not None:
            log.info("batch over", batch=batch, state=record.state.value, error=record.error)
        return record
