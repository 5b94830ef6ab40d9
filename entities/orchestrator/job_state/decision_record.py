"""The commit point: one record per job, changed by compare-and-set (DESIGN §5 rule 6).

The content of an unreadable record is never guessed. An orchestrator that takes over a job whose record can't
be read goes back to the checkpoint. The writer itself, once its lead is confirmed, knows that nobody has
decided since, and writes the record again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import STEP_DECISION
from schemas.errors import Conflict, Fenced, Unavailable, UnreadableRecord
from schemas.step import StepDecision

log = get_logger("orchestrator")


class DecisionRecord:
    """The decision record of one job, as the orchestrator of `epoch` writes it.

    `confirmed` returns if this orchestrator surely leads. `unknown`: the record could not be read by `take`.
    `retry_s`: pause before a failed write is repeated, without a limit, for the disk of the bus may be full.
    """

    def __init__(
        self,
        bus: Bus,
        job: str,
        epoch: int,
        confirmed: Callable[[], Awaitable[None]] | None = None,
        *,
        retry_s: float = 0.2,
    ) -> None:
        self._retry_s = retry_s
        self.unknown = False
        self._confirmed = confirmed
        self._bucket = bus.bucket(STEP_DECISION)
        self.job = job
        self._epoch = epoch
        self._revision: int | None = None
        self._last: StepDecision | None = None
        self.replaced = 0
        """Samples of all steps so far that were put in an unreadable's place; set it on going back."""

    async def take(self) -> StepDecision | None:
        """Writes this epoch into the record, so that no earlier orchestrator decides any more.

        Returns:
            The last decision, whoever made it; None before the first, or where it is `unknown`.

        Raises:
            Fenced: a later orchestrator has taken the record already.
            NewerRecord: the record has a version that this software can't read.
        """
        while True:
            try:
                try:
                    last = await self._read()
                except UnreadableRecord as error:
                    self.unknown = True
                    self._revision = int(error.fields["revision"])
                    last = None
                if last is None and self._revision:
                    self._revision = await self._bucket.update(
                        self._nothing(), revision=self._revision, job=self.job
                    )
                    return None
                if last is None:
                    self._revision = await self._bucket.create(self._nothing(), job=self.job)
                    return None
                if last.epoch != self._epoch:
                    assert self._revision is not None
                    own = last.model_copy(update={"epoch": self._epoch})
                    self._revision = await self._bucket.update(own, revision=self._revision, job=self.job)
                self._last = last if last.step >= 0 else None
                self.replaced = last.replaced_before + last.replaced
                return self._last
            except Conflict:
                continue  # another orchestrator wrote in between: read again
            except Unavailable:
                await asyncio.sleep(self._retry_s)

    async def write(self, decision: StepDecision) -> None:
        """Records a decision.

        Raises:
            Fenced: another orchestrator has moved the record on; this one must stop.
            NewerRecord: an orchestrator of a newer version has.
        """
        await self._record(decision.model_copy(update={"replaced_before": self.replaced}))

    async def _record(self, decision: StepDecision) -> None:
        while True:
            try:
                await self._write(decision)
                self._last = decision
                self.replaced = decision.replaced_before + decision.replaced
                return
            except (Conflict, UnreadableRecord) as error:
                if not await self._ours_still():
                    raise Fenced(f"the decision record of job {self.job} moved on: {error}") from None
            except Unavailable:
                # it may have been written: the next attempt reads through the bucket's leader first
                self._revision = None
                await asyncio.sleep(self._retry_s)

    async def stop(self, step: int) -> None:
        """Notes in the decision before `step` that training ends with it, as a metric has decided.

        Raises:
            Fenced, NewerRecord: As `write`.
        """
        if self._last is not None and self._last.step == step - 1:
            await self._record(self._last.model_copy(update={"epoch": self._epoch, "stop": step}))

    async def _ours_still(self) -> bool:
        """Whether the record is unreadable or removed and this orchestrator leads, so that it may write."""
        if self._confirmed is None:
            return False
        while True:
            try:
                if await self._read() is not None:
                    return False
                break
            except UnreadableRecord as error:
                self._revision = int(error.fields["revision"])
                break
            except Unavailable:
                await asyncio.sleep(self._retry_s)
        await self._confirmed()
        why = "unreadable" if self._revision else "removed"
        log.error("decision record written again", job=self.job, why=why)
        return True

    def _nothing(self) -> StepDecision:
        """The record before the first decision: it only names the epoch."""
        return StepDecision(
            job=self.job,
            epoch=self._epoch,
            step=-1,
            attempt=0,
            generations=(),
            membership=(),
            checksums=(),
            gradient_norm=0.0,
            clip=1.0,
            action="skip",
        )

    async def _read(self) -> StepDecision | None:
        entry = await self._bucket.get(leader=True, job=self.job)
        if entry is None:
            self._revision = 0
            return None
        assert isinstance(entry.message, StepDecision)
        if entry.message.epoch > self._epoch:
            raise Fenced(f"job {self.job} is led in epoch {entry.message.epoch}")
        self._revision = entry.revision
        return entry.message

    async def _write(self, decision: StepDecision) -> None:
        if self._revision is None and await self._read() == decision:
            return
        if self._revision:
            self._revision = await self._bucket.update(decision, revision=self._revision, job=self.job)
        else:
            self._revision = await self._bucket.create(decision, job=self.job)
