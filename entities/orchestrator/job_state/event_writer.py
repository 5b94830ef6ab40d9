"""Events of a job's training: written in order, beside the training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.quarantine import BadMicrobatch
from entities.orchestrator.planning.change_account import in_words
from schemas.alert import Alert
from schemas.changes import JobChange
from schemas.fault_choices import FaultChoice, choice_text
from schemas.job import NodeCut, StepResult
from schemas.recut import RecutRecord, cuts_text


class EventWriter:
    """A queue of writes to the job's store. All methods return at once; `run` writes one after the other."""

    def __init__(self, store: JobStore, instances: JobInstances) -> None:
        self._store = store
        self._instances = instances
        self._writes: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()

    async def run(self) -> None:
        while True:
            write = await self._writes.get()
            try:
                await write()
            finally:
                self._writes.task_done()

    async def written(self) -> None:
        """Returns once all events so far are on the job's stream."""
        await self._writes.join()

    def _put(self, event: Mapping[str, Any], *, now: bool = False, **figures: Any) -> None:
        """Queues figures for the record, and an event that follows them. `now`: the figures are urgent."""

        async def write() -> None:
            if figures:
                await self._store.note(now=now, **figures)
            await self._store.tell(**event)

        self._writes.put_nowait(write)

    def step(self, result: StepResult, counts: Mapping[str, Any]) -> None:
        """A step was decided. `counts`: further fields of the record (`FailureHandling.counts`)."""

        async def write() -> None:
            record = self._store.record
            first, redone = record.loss_first, result.step < record.furthest
            await self._store.note(
                step=result.step + 1,
                loss_first=result.loss if first is None else first,
                loss_last=result.loss,
                tokens_per_s=result.tokens_per_s,
                usage=record.usage.stepped(result.step_s, result.attempt, redone=redone),
                **counts,
            )
            await self._store.tell("step", result=result, total_steps=self._store.record.last_step)
            if result.overflowed:
                text = f"step {result.step} left out: {_overflow(result)}"
                await self._store.tell("skipped", text=text, skipped_step=result.step)

        self._writes.put_nowait(write)

    def alert(self, alert: Alert, raised: tuple[Alert, ...]) -> None:
        """An alert was raised or cleared. `raised`: all that are raised now, for the record."""
        self._put({"kind": "alert", "text": alert.text, "alert": alert}, now=True, alerts=raised)

    def energy(self, router: str, energy_j: float) -> None:
        """A router tells what the job's devices have used since it first saw the job, J."""

        async def write() -> None:
            await self._store.note(usage=self._store.record.usage.metered(router, energy_j))

        self._writes.put_nowait(write)

    def validation(
        self, step: int, loss: float, metrics: Mapping[str, float], problems: Sequence[str] = ()
    ) -> None:
        """A validation was made. `problems`: what of it has no value, in words."""
        event = {"kind": "validation", "validation_step": step, "validation_loss": loss}
        self._put(
            {**event, "metrics": dict(metrics), "text": "; ".join(problems)},
            validation_loss=loss,
            metrics=dict(metrics),
        )

    def skipped(self, bad: BadMicrobatch) -> None:
        """A step was left out because of a bad microbatch."""
        event = {"kind": "skipped", "text": f"left out: {bad}", "skipped_step": bad.step}
        self._put(event, step=bad.step + 1)

    def changing(self, change: JobChange, changes: tuple[JobChange, ...]) -> None:
        """A change that alters the job's speed goes on. `changes`: all that the record holds."""
        event = {"kind": "change", "text": in_words(change), "change": change}
        self._put(event, now=True, changes=changes)

    def recut(self, record: RecutRecord, records: tuple[RecutRecord, ...]) -> None:
        """A re-cut has another state. `records`: all that the job's record holds."""
        text = f"plan {record.plan} ({cuts_text(record.cuts)}): {record.state}"
        text += f": {record.why}" if record.why else ""
        self._put({"kind": "recut", "recut": record, "text": text}, now=True, recuts=records)

    def recuts(self, records: tuple[RecutRecord, ...]) -> None:
        """What a re-cut has cost is known now. `records`: all that the job's record holds."""
        self._writes.put_nowait(lambda: self._store.note(now=True, recuts=records))

    def fault_choice(self, choice: FaultChoice, choices: tuple[FaultChoice, ...]) -> None:
        """What is done about a fault that modules were asked about. `choices`: all that the record holds."""
        event = {"kind": "fault_choice", "fault_choice": choice, "text": choice_text(choice)}
        self._put(event, now=True, fault_choices=choices)

    def fault(self, text: str) -> None:
        self._put({"kind": "fault", "text": text})

    def partitioned(self, text: str, cuts: tuple[NodeCut, ...]) -> None:
        """One side of a network partition was given up. `cuts`: all partitions that the record holds."""
        self._put({"kind": "fault", "text": text}, now=True, cuts=cuts)

    def recovery(self, text: str) -> None:
        self._put({"kind": "recovery", "text": text})

    def one_more_lost(self, failure_counts: Mapping[str, Any]) -> None:
        """Counts one more lost member in the record."""
        self._writes.put_nowait(
            lambda: self._store.note(now=True, recoveries=self._store.record.recoveries + 1, **failure_counts)
        )

    def failures(self, failure_counts: Mapping[str, Any], *, now: bool) -> None:
        """Records what broke steps so far; `now`: at once, not with the next write."""
        self._writes.put_nowait(lambda: self._store.note(now=now, **failure_counts))

    def changed(self, text: str, reason: str | None = None) -> None:
        """The members of the job have changed, or will. `reason`: of its state, from now on."""
        figures = {} if reason is None else {"reason": reason}

        async def write() -> None:
            await self._store.note(now=True, graph=self._instances.deployed, **figures)
            await self._store.tell("instances", text=text, instances=self._instances.views())

        self._writes.put_nowait(write)


def _overflow(result: StepResult) -> str:
    """Why a step in fp16 was left out, in words."""
    numbers = ", ".join(map(str, result.overflowed))
    return (
        f"gradients of microbatch{'es' * (len(result.overflowed) > 1)} {numbers} overflowed fp16 at loss "
        f"scale {result.loss_scale:g}, which halves"
    )
