"""The commit point: one record per job, moved on by compare-and-set (DESIGN §5 rule 6).

What it said is never guessed. Whoever takes over a job and finds that it can't be read goes back to the
checkpoint. Its own writer, sure of its lead, knows that nobody has decided since, and writes on.
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

RETRY_S = 0.2
"""How often the bus is asked again to keep a decision: until it does, for its disk may be full."""


class DecisionRecord:
    """The decision record of one job, as the orchestrator of `epoch` writes it.

    `confirmed` returns while that surely leads. `unknown`: when it was taken, nobody could read it.
    """

    def __init__(
        self, bus: Bus, job: str, epoch: int, confirmed: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.unknown = False
        self._confirmed = confirmed
        self._bucket = bus.bucket(STEP_DECISION)
        self.job = job
        self._epoch = epoch
        self._revision: int | None = None

    async def take(self) -> StepDecision | None:
        """Writes this epoch into the record, so that no earlier orchestrator decides any more.

        Returns:
            The last decision, whoever made it; None before the first, or where it is `unknown`.

        Raises:
            Fenced: a later orchestrator has taken it already.
            NewerRecord: what stands there is of a version that this software does not read.
        """
        while True:
            try:
                try:
                    held = await self._read()
                except UnreadableRecord as error:
                    self.unknown = True
                    self._revision = int(error.fields["revision"])
                    held = None
                if held is None and self._revision:
                    self._revision = await self._bucket.update(
                        self._nothing(), revision=self._revision, job=self.job
                    )
                    return None
                if held is None:
                    self._revision = await self._bucket.create(self._nothing(), job=self.job)
                    return None
                if held.epoch != self._epoch:
                    assert self._revision is not None
                    taken = held.model_copy(update={"epoch": self._epoch})
                    self._revision = await self._bucket.update(taken, revision=self._revision, job=self.job)
                return held if held.step >= 0 else None
            except Conflict:
                continue  # somebody wrote in between: read again
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    async def write(self, decision: StepDecision) -> None:
        """Records a decision.

        Raises:
            Fenced: another orchestrator has moved the record on; this one must stop.
            NewerRecord: one of a newer version has.
        """
        while True:
            try:
                await self._write(decision)
                return
            except (Conflict, UnreadableRecord) as error:
                if not await self._ours_still():
                    raise Fenced(f"the decision record of job {self.job} moved on: {error}") from None
            except Unavailable:
                # unknown: it may have been written; read through the leader before anything else
                self._revision = None
                await asyncio.sleep(RETRY_S)

    async def _ours_still(self) -> bool:
        """Whether what stands there was written by nobody who leads, so that it may be written over."""
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
                await asyncio.sleep(RETRY_S)
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
        held = await self._bucket.get(leader=True, job=self.job)
        if held is None:
            self._revision = 0
            return None
        assert isinstance(held.message, StepDecision)
        if held.message.epoch > self._epoch:
            raise Fenced(f"job {self.job} is led in epoch {held.message.epoch}")
        self._revision = held.revision
        return held.message

    async def _write(self, decision: StepDecision) -> None:
        if self._revision is None and await self._read() == decision:
            return
        if self._revision:
            self._revision = await self._bucket.update(decision, revision=self._revision, job=self.job)
        else:
            self._revision = await self._bucket.create(decision, job=self.job)
