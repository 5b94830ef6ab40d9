"""The accountant's service: follows reports and claims, answers for statements, watches budgets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.key_value import Change, Watch
from bus.messaging.streams import StreamRecord
from bus.subject_row import Subject
from bus.tasks import background
from entities import metrics
from entities.accountant.account_book import AccountBook
from entities.accountant.budget_book import BudgetMeter, budget_key, period_start
from entities.accountant.ledger import Charge, RowKey, parts_of
from entities.accountant.payers import Payers
from entities.accountant.prices_file import PricesFile
from entities.accountant.statement import make_statement
from entities.presence.entity_record import entity_record, stay_registered
from schemas.accounts import SLICE_S, AccountQuery, AccountStatement, BudgetState, BudgetUse
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BadInput, Conflict, DmscError
from schemas.job import ENDED, JobRecord
from schemas.tariff import Tariff

log = get_logger("accountant")

NODE = "mesh"
QUESTIONS_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class AccountantConfig:
    """The accountant's configuration."""

    prices_file: Path | None = None  # read again when it changes
    otherwise: Tariff = field(default_factory=Tariff)  # what holds without a file
    every_s: float = 5.0  # how often the streams are read: how late a statement is at most
    storage_every_s: float = 300.0  # how often what is stored is looked at
    batch: int = 2000  # most messages between two writes of the position
    dropped_after_s: float = 600.0  # from a job's end until how far its claims were is forgotten
    retry_s: float = 0.5
    fresh_s: float = 1.0  # accounts not older than this are told without reading the streams again
    longest_s: float = 100 * 86_400.0  # the period of one statement: it is made from up to 9,600 slices


class Accountant:
    """One accountant; any number of them write the same accounts.

    Raises:
        BadInput: the file of prices is wrong.
    """

    def __init__(self, bus: Bus, config: AccountantConfig = AccountantConfig()) -> None:
        self._bus = bus
        self._config = config
        self._prices = PricesFile(config.prices_file, config.otherwise)
        self._payers = Payers()
        self._book = AccountBook(bus, self._payers.of, time.time)
        self._ended: dict[str, float] = {}
        self._meters: dict[str, BudgetMeter] = {}
        self._uses: dict[str, BudgetUse] = {}
        self._written: dict[str, BudgetUse] = {}
        self._told_states = False
        self._stored_at = 0.0
        self._watch: Watch | None = None
        self._jobs_known = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held while the accounts go on, so that a statement is of one moment."""
        self._advanced_at: float | None = None

    def readings(self) -> Iterator[metrics.MetricReading]:
        """The metrics of the accounts."""
        added = self._book.added
        waiting = max(0.0, added["held_s"] - added["busy_s"] - added["recomputed_s"])
        for use, value in (
            ("busy", added["busy_s"]),
            ("waiting", waiting),
            ("recomputed", added["recomputed_s"]),
            ("idle", added["idle_s"]),
        ):
            yield metrics.ACCOUNT_SECONDS(value, use=use)
        yield metrics.ACCOUNT_OFFERED(added["offered_s"])
        if self._advanced_at is not None:
            yield metrics.ACCOUNT_LAG(max(0.0, time.time() - self._advanced_at))
        for used in self._uses.values():
            yield metrics.BUDGET_USED(used.share, owner=used.budget.owner, per=used.budget.per)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled. What was told while no accountant ran is counted first."""
        sender = self._bus.sender
        record = entity_record(EntityKind.ACCOUNTANT, sender.name, sender.incarnation, node=NODE)
        presence = stay_registered(self._bus, record, log.info, retry_s=self._config.retry_s)
        serving = await self._bus.serve(
            subjects.ACCOUNT_QUERY, self._query, queue_group="accountant", concurrency=QUESTIONS_AT_ONCE
        )
        try:
            async with background(presence, name=f"presence of {sender.name}"):
                log.debug("accountant ready", service=sender.name)
                if ready is not None:
                    ready.set()
                while True:
                    with suppress(DmscError):
                        await self.advance()
                    await asyncio.sleep(self._config.every_s)
        finally:
            await serving.stop()
            await self.close()

    async def _know_jobs(self) -> None:
        """Returns once it is known whose jobs are: what is charged to nobody known stays nobody's."""
        if self._watch is None:
            self._watch = await self._bus.bucket(subjects.JOB_RECORD).watch(self._on_job)
        await self._jobs_known.wait()

    async def close(self) -> None:
        """Ends what `advance` has begun; twice is fine."""
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.stop()

    async def _on_job(self, change: Change) -> None:
        if not change.key:
            self._jobs_known.set()
        elif isinstance(record := change.message, JobRecord):
            self._payers.take(record)
            if record.state in ENDED:
                self._ended.setdefault(record.job, record.changed_at)
            else:
                self._ended.pop(record.job, None)

    # --- counting -----------------------------------------------------------------------------------------
    async def advance(self) -> None:
        """Counts all that was told so far, and looks at the budgets.

        Raises:
            DmscError: the bus is away, or another accountant was quicker; the next call goes on.
        """
        async with self._turn:
            try:
                began = time.time()
                await self._know_jobs()
                await self._follow(subjects.SLOT_REPORT, "slots", self._book.take_reports)
                await self._follow(subjects.STEP_CLAIM, "claims", self._book.take_claims)
                await self._follow(subjects.USE_REPORT, "uses", self._book.take_uses)
                await self._count_stored(began)
                await self._drop_ended(began)
                await self._look_at_budgets(began)
                self._advanced_at = began
            except DmscError as error:
                level = log.debug if isinstance(error, Conflict) else log.info
                level("accounts wait", reason=error.text)
                self._book.forget()
                self._meters.clear()
                raise

    async def _follow(
        self, row: Subject, name: str, take: Callable[[Sequence[StreamRecord], int], Awaitable[None]]
    ) -> None:
        base = await self._book.base(row, name)
        start = await self._book.position(name) - base + 1
        batch: list[StreamRecord] = []
        async for record in self._bus.history(row, start=start):
            batch.append(record)
            if len(batch) >= self._config.batch:
                await take(batch, base)
                batch = []
                await asyncio.sleep(0)
        await take(batch, base)

    async def _count_stored(self, now: float) -> None:
        if now < self._stored_at + self._config.storage_every_s:
            return
        at = int(now)
        last = await self._book.position("storage") or at
        last = max(last, int(now - 86_400.0))  # nobody looked for longer: what was stored then is not known
        last = await self._book.storage_until(start for start, _ in parts_of(last, at))
        sizes: dict[str, int] = {}
        for info in await self._bus.objects.list():
            job = next((part for part in info.name.split("/") if part in self._payers), None)
            if job is not None:
                sizes[job] = sizes.get(job, 0) + info.size
        charges = [
            Charge(start, RowKey("job", job, "", ""), {"stored_byte_s": size * part_s})
            for start, part_s in parts_of(last or at, at)
            for job, size in sizes.items()
        ]
        await self._book.take_storage(charges, at)
        self._stored_at = now

    async def _drop_ended(self, now: float) -> None:
        due = [job for job, at in self._ended.items() if now > at + self._config.dropped_after_s]
        if due:
            await self._book.drop_jobs(due)
        for job in due:
            self._ended.pop(job, None)

    # --- budgets ------------------------------------------------------------------------------------------
    async def _look_at_budgets(self, now: float) -> None:
        if self._prices.look():
            self._meters.clear()
        tariff, changed = self._prices.tariff, tuple(self._book.changed.values())
        self._book.changed.clear()
        budgets = {budget_key(budget): budget for budget in tariff.budgets}
        if not budgets and self._told_states and not self._written:
            return
        uses: dict[str, BudgetUse] = {}
        for key, budget in budgets.items():
            since, meter = period_start(budget, now), self._meters.get(key)
            if meter is None or meter.since != since:
                meter = self._meters[key] = BudgetMeter(budget, tariff, since)
                meter.take(await self._book.slices(since, now + 1))
            else:
                meter.take(changed)
            uses[key] = meter.use()
        self._uses = uses
        await self._tell_budgets(uses, now)

    async def _tell_budgets(self, uses: dict[str, BudgetUse], now: float) -> None:
        bucket = self._bus.bucket(subjects.BUDGET_STATE)
        if not self._told_states:
            self._written = {entry.key: entry.message.use for entry in await bucket.entries()}
            self._told_states = True
        for key, use in uses.items():
            before = self._written.get(key)
            if before is not None and (before.state, before.budget, before.since) == (
                use.state,
                use.budget,
                use.since,
            ):
                continue
            await bucket.put(BudgetState(use=use, at=now), budget=key)
            self._written[key] = use
            if use.state != "within":
                log.warning("budget", state=use.state, reason=use.why)
        for key in [key for key in self._written if key not in uses]:
            await bucket.delete(budget=key)
            del self._written[key]

    # --- questions ----------------------------------------------------------------------------------------
    async def _query(self, question: AccountQuery, envelope: Envelope) -> AccountStatement:
        """
        Raises:
            BadInput: the period is none, or too long.
        """
        if question.until <= question.since:
            raise BadInput("a statement ends after it begins: give a later `until`")
        longest_s = self._config.longest_s
        if question.until - question.since > longest_s:
            days = longest_s / 86_400
            raise BadInput(f"a statement covers at most {days:g} days: ask for parts of the time")
        if self._advanced_at is None or time.time() > self._advanced_at + self._config.fresh_s:
            with suppress(DmscError):  # what is counted is told, if the streams can't be read just now
                await self.advance()
        slices = await self._book.slices(question.since - question.since % SLICE_S, question.until)
        statement = await asyncio.to_thread(
            make_statement,
            slices,
            self._prices.tariff,
            question.by,
            question.since,
            question.until,
            only=question.user,
            service=question.service,
        )
        uses = [
            use
            for use in self._uses.values()
            if question.user is None
            or use.budget.user == question.user
            or self._owns(use.budget.job, question.user)
        ]
        return statement.model_copy(update={"budgets": tuple(uses)})

    def _owns(self, job: str, user: str) -> bool:
        return bool(job) and self._payers.job(job).user == user
