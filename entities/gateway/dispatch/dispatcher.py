"""STEP_BEGIN at the entry gateway (draft §4.4(2)): dispatches each microbatch to a data instance.

A microbatch is bound once per (job, epoch, step, attempt): a repeated STEP_BEGIN goes to the same instance
again. Only the orchestrator raises an attempt; the dispatcher then cancels the calls of the older one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import cancel
from entities.gateway.dispatch.rules import EntryChoice, choose_entries, entry_query
from entities.presence.registry_view import RegistryFollower
from entities.qos.fault_reporter import FaultReporter
from entities.qos.policy_book import PolicyBook
from entities.qos.window import QosWindow
from schemas.envelope import Envelope
from schemas.errors import Ack, Fenced, Unavailable
from schemas.fault import FaultReport
from schemas.registry import InstanceState, ServiceRecord, TensorSchema
from schemas.signals import ComputeEntry
from schemas.step import MicrobatchDispatch, StepBegin

log = get_logger("dispatcher")


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Deadlines and memory of the dispatcher."""

    deadline_s: float = 10.0  # of one STEP_DISPATCH with its repetitions; then the fault is reported
    entry_wait_s: float = 3.0  # for an active data instance to appear in our registry view, which lags
    remembered: int = 256  # steps whose bindings are kept for a repeated STEP_BEGIN

    def __post_init__(self) -> None:
        if not 0 < self.entry_wait_s < self.deadline_s:
            raise ValueError(
                f"entry_wait_s {self.entry_wait_s} must be above 0 and below deadline_s {self.deadline_s}"
            )


def in_words(batch: Iterable[TensorSchema]) -> str:
    """A batch's tensors, for people: `int64 [4, 16]`."""
    return ", ".join(f"{each.dtype} {list(each.shape)}" for each in batch)


class StepKey(NamedTuple):
    job: str
    epoch: int
    step: int
    attempt: int
    evaluate: bool


@dataclass(slots=True)
class _Step:
    bound: dict[int, str] = field(default_factory=dict)  # microbatch → SID
    acknowledged: set[int] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    superseded: asyncio.Event = field(default_factory=asyncio.Event)


class Dispatcher:
    """Serves `STEP_BEGIN` of one gateway. `compute` returns the last Type 4 entries by cluster."""

    def __init__(
        self,
        bus: Bus,
        sid: str,
        follower: RegistryFollower,
        book: PolicyBook,
        compute: Callable[[], Mapping[str, tuple[ComputeEntry, ...]]],
        faults: FaultReporter,
        qos: QosWindow,
        config: DispatcherConfig,
    ) -> None:
        self._bus = bus
        self._sid = sid
        self._follower = follower
        self._book = book
        self._compute = compute
        self._faults = faults
        self._qos = qos
        self._config = config
        self._steps: OrderedDict[StepKey, _Step] = OrderedDict()
        self._reasons: dict[str, str] = {}
        bus.pulse.attend()

    async def begin(self, message: StepBegin, envelope: Envelope) -> Ack:
        """Binds and dispatches the microbatches; returns once every data instance has acknowledged.

        Raises:
            Fenced: a newer attempt or epoch of the job was begun.
            Unavailable: there is no active data instance, or one did not answer (reported as a fault).
        """
        key = StepKey(message.job, message.epoch, message.step, message.attempt, message.evaluate)
        step = self._open(key)
        async with step.lock:
            missing = [number for number in message.microbatches if number not in step.bound]
            if missing:
                choice = await self._choose(message.job, missing)
                for sid, numbers in choice.shares.items():
                    step.bound.update(dict.fromkeys(numbers, sid))
            pending: dict[str, list[int]] = {}
            for number in sorted(set(message.microbatches) - step.acknowledged):
                pending.setdefault(step.bound[number], []).append(number)
            results = await asyncio.gather(
                *(
                    self._dispatch(key, step, sid, tuple(numbers), envelope)
                    for sid, numbers in pending.items()
                ),
                return_exceptions=True,
            )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return Ack(note=", ".join(f"{sid}: {len(numbers)}" for sid, numbers in pending.items()))

    def forget(self, job: str) -> None:
        """Cancels the calls of a job that has ended, and drops its bindings."""
        for key in [key for key in self._steps if key.job == job]:
            self._steps.pop(key).superseded.set()
        self._reasons.pop(job, None)

    def _open(self, key: StepKey) -> _Step:
        existing = self._steps.get(key)
        if existing is not None and not existing.superseded.is_set():
            return existing
        if existing is not None:
            raise _superseded(key)
        for other, step in list(self._steps.items()):
            if other.job != key.job or other.evaluate != key.evaluate:
                continue
            if supersedes(other, key):
                raise Fenced(
                    f"{key.job}: step {key.step} attempt {key.attempt} of epoch {key.epoch} is older than "
                    f"attempt {other.attempt} of epoch {other.epoch}, which was begun here"
                )
            if supersedes(key, other):
                step.superseded.set()
        step = self._steps[key] = _Step()
        while len(self._steps) > self._config.remembered:
            self._steps.popitem(last=False)
        return step

    async def _choose(self, job: str, microbatches: list[int]) -> EntryChoice:
        policy = self._book.active.get(job)
        view, query = self._follower.view, entry_query(job, policy.entry_schema if policy else ())
        if not view.resolve(query):
            await self._follower.wait_for(lambda view: bool(view.resolve(query)), self._config.entry_wait_s)
        choice = choose_entries(view.resolve(query), self._compute(), job, microbatches)
        if not choice.shares:
            what = f" whose batches are {in_words(query.output_schema)}" if query.output_schema else ""
            raise Unavailable(f"{job}: {choice.reason}{what} is registered; the step can't begin", job=job)
        if self._reasons.get(job) != choice.reason:
            self._reasons[job] = choice.reason
            log.info(
                "entries chosen",
                job=job,
                reason=choice.reason,
                shares={sid: len(numbers) for sid, numbers in choice.shares.items()},
            )
        return choice

    async def _dispatch(
        self, key: StepKey, step: _Step, sid: str, microbatches: tuple[int, ...], envelope: Envelope
    ) -> None:
        message = MicrobatchDispatch(
            job=key.job,
            epoch=key.epoch,
            step=key.step,
            attempt=key.attempt,
            microbatches=microbatches,
            evaluate=key.evaluate,
        )
        before = self._follower.view.records.get(sid)
        begun = time.monotonic()
        call = asyncio.create_task(
            self._bus.command(
                subjects.STEP_DISPATCH,
                message,
                deadline_s=self._config.deadline_s,
                while_heard=True,
                cause=envelope,
                job=key.job,
                sid=sid,
            )
        )
        superseded = asyncio.create_task(step.superseded.wait())
        try:
            await asyncio.wait({call, superseded}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise _superseded(key)
            call.result()
            step.acknowledged.update(microbatches)
        except Unavailable as error:
            self._report(key, sid, before, error)
            raise
        finally:
            failed = not call.done() or call.cancelled() or call.exception() is not None
            self._qos.add_call(key.job, 1e3 * (time.monotonic() - begun), failed=failed)
            await cancel(call, superseded)

    def _report(self, key: StepKey, sid: str, record: ServiceRecord | None, error: Unavailable) -> None:
        now = self._follower.view.records.get(sid)
        if record is None or now is None or now.incarnation != record.incarnation:
            return  # it was replaced meanwhile: the orchestrator knows already
        if now.state is not InstanceState.ACTIVE:
            return
        self._faults.report(
            FaultReport(
                reporter=self._sid,
                job=key.job,
                sid=sid,
                incarnation=record.incarnation,
                kind="request",
                evidence=f"dispatch of step {key.step} attempt {key.attempt} failed: {error.text}",
            )
        )


def _superseded(key: StepKey) -> Fenced:
    return Fenced(f"{key.job}: attempt {key.attempt} of step {key.step} was superseded", job=key.job)


def supersedes(newer: StepKey, older: StepKey) -> bool:
    """Whether `newer`, of the same job and kind, has a higher epoch, or a higher attempt of the same step."""
    if newer.epoch != older.epoch:
        return newer.epoch > older.epoch
    return newer.step == older.step and newer.attempt > older.attempt
