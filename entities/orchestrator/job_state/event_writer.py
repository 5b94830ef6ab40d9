"""What people are told of a job's training: in order, and off the critical path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.quarantine import BadMicrobatch
from entities.orchestrator.planning.stage_moves import in_words
from schemas.alert import Alert
from schemas.job import NodeCut, StepResult
from schemas.stage_move import StageMove


class EventWriter:
    """Returns at once; `run` brings each word to the journal, one after the other."""

    def __init__(self, journal: JobStore, instances: JobInstances) -> None:
        self._journal = journal
        self._instances = instances
        self._steps = journal.record.spec.training.steps
        self._words: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()

    async def run(self) -> None:
        while True:
            word = await self._words.get()
            try:
                await word()
            finally:
                self._words.task_done()

    async def told(self) -> None:
        """Returns once everything so far is on the job's stream."""
        await self._words.join()

    def step(self, result: StepResult, counted: Mapping[str, Any]) -> None:
        """`counted`: what broke steps so far, see `Troubles.counted`."""

        async def word() -> None:
            first = self._journal.record.loss_first
            await self._journal.note(
                step=result.step + 1,
                loss_first=result.loss if first is None else first,
                loss_last=result.loss,
                tokens_per_s=result.tokens_per_s,
                **counted,
            )
            await self._journal.tell("step", result=result, total_steps=self._steps)

        self._words.put_nowait(word)

    def alert(self, alert: Alert, raised: tuple[Alert, ...]) -> None:
        """`raised`: all that stand now, for the record."""

        async def word() -> None:
            await self._journal.note(now=True, alerts=raised)
            await self._journal.tell("alert", text=alert.text, alert=alert)

        self._words.put_nowait(word)

    def validation(self, step: int, loss: float) -> None:
        async def word() -> None:
            await self._journal.note(validation_loss=loss)
            await self._journal.tell("validation", validation_step=step, validation_loss=loss)

        self._words.put_nowait(word)

    def left_out(self, bad: BadMicrobatch) -> None:
        """A step was left out because of it."""

        async def word() -> None:
            await self._journal.note(step=bad.step + 1)
            await self._journal.tell("skipped", text=f"left out: {bad}", skipped_step=bad.step)

        self._words.put_nowait(word)

    def moved(self, move: StageMove, kept: tuple[StageMove, ...]) -> None:
        """News of an instance that changes its stage. `kept`: what the record holds of all moves."""

        async def word() -> None:
            await self._journal.note(now=True, moves=kept)
            await self._journal.tell("rebalancing", text=in_words(move), move=move)

        self._words.put_nowait(word)

    def fault(self, text: str) -> None:
        self._words.put_nowait(lambda: self._journal.tell("fault", text=text))

    def cut(self, text: str, cuts: tuple[NodeCut, ...]) -> None:
        """A side of a cut was given up. `cuts`: all that the job's record is to know."""

        async def word() -> None:
            await self._journal.note(now=True, cuts=cuts)
            await self._journal.tell("fault", text=text)

        self._words.put_nowait(word)

    def recovery(self, text: str) -> None:
        self._words.put_nowait(lambda: self._journal.tell("recovery", text=text))

    def one_more_lost(self, counted: Mapping[str, Any]) -> None:
        """Counts it in the record."""
        self._words.put_nowait(
            lambda: self._journal.note(now=True, recoveries=self._journal.record.recoveries + 1, **counted)
        )

    def counted(self, counted: Mapping[str, Any], *, now: bool) -> None:
        """What broke steps so far; `now`: written at once, not with the next news."""
        self._words.put_nowait(lambda: self._journal.note(now=now, **counted))

    def changed(self, text: str) -> None:
        """Who works in the job is not what it was."""

        async def word() -> None:
            await self._journal.note(now=True, graph=self._instances.graph)
            await self._journal.tell("instances", text=text, instances=self._instances.views())

        self._words.put_nowait(word)
