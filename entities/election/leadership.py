"""Standing for a role's lead (orchestrator, registry): claim, renew, be sure, give back. Rules: `lease.py`.

A leader that could not renew in time decides nothing (`confirmed` waits) until its next renewal tells:
it went through, then nobody else has led meanwhile, for the compare-and-set names the revision that was its
own; or somebody else has the next term, then it is over (`keep` returns). That holds for one that was
frozen, cut off, or whose server was away.

A record that can't be read, or was removed, is written again by a holder that is sure of its lead; one that
is not lets it go, for somebody else may have led meanwhile. Whoever finds such a record waits a whole lease
for its holder to do so, and takes a term above all that there can have been: each took a write, so none is
above the record's revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.election.lease import (
    LeadershipLeaseConfig,
    Silence,
    claimable,
    is_same_leadership,
    next_claim,
    sure_until,
)
from schemas.errors import Conflict, DeadlineExceeded, DmscError, NewerRecord, UnreadableRecord
from schemas.leadership import Leadership

log = get_logger("leadership")

RELEASE_S = 1.0
"""How long giving the lease back may take; its silence does it otherwise."""

_Result = TypeVar("_Result")


def now() -> float:
    """Seconds of a clock that also counts while the machine sleeps, where there is one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class LeaderCandidate:
    """One service's standing among those of its `role`: `term` is 0 while it does not lead."""

    def __init__(
        self, bus: Bus, config: LeadershipLeaseConfig, *, role: str = "orchestrator", node: str = ""
    ) -> None:
        self.config = config
        self._role = role
        self.claim: Leadership | None = None
        self._bus = bus
        self._bucket = bus.bucket(subjects.LEADERSHIP)
        self._node = node
        self._revision = 0
        self._written = 0.0  # when the last write began that went through
        self._renewed = asyncio.Condition()
        self._due = asyncio.Event()
        self._highest = 0  # term that was seen
        self.refusal = ""
        """Why this one can't stand for the lead; empty: it can."""
        bus.on_reconnect(self._on_reconnect)

    @property
    def term(self) -> int:
        return self.claim.term if self.claim is not None else 0

    @property
    def sure(self) -> bool:
        """Nobody else can have the lead at this moment."""
        return self.claim is not None and now() < sure_until(self._written, self.claim.lease_s)

    async def won(self) -> int:
        """Waits until this one leads; returns the term."""
        silence = Silence(self.config.look_s)
        while True:
            try:
                began = now()
                held, revision = await self._attempt(self._read)
                silent_s = silence.see(revision, now())
                if (
                    claimable(held, silent_s)
                    if held is not None
                    else (not (revision or self._highest) or silent_s >= self.config.lease_s)
                ):
                    began = now()
                    return await self._attempt(lambda: self._write_claim(held, revision, began))  # noqa: B023  # awaited in the same round
                self.refusal = ""
            except NewerRecord as error:
                if not self.refusal:
                    log.error("this one does not lead", role=self._role, reason=error.text)
                self.refusal = error.text
            except Conflict as error:
                log.info("somebody else was quicker", reason=error.text)
            except DmscError as error:
                log.debug("the lease can't be looked at", reason=error.text)
                silence.blink()
            await asyncio.sleep(max(0.0, began + self.config.look_s - now()))

    async def keep(self) -> str:
        """Renews until somebody else has the lead; returns who, in words. Cancel it to stop."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.renew_s):
                    await self._due.wait()
            self._due.clear()
            try:
                if (lost := await self._attempt(self._renew)) is not None:
                    self.claim = None
                    return lost
            except DmscError as error:
                log.debug("the lease was not renewed", term=self.term, reason=error.text)

    async def confirmed(self) -> None:
        """Returns while the lead is surely ours; else waits for a renewal that tells, or for ever.

        It must have begun after we asked: the answer to an earlier one may have lain in our socket while
        we were frozen. Who loses the lead is cancelled here, and so answers nobody.
        """
        if self.sure:
            return
        asked = now()
        self._due.set()
        async with self._renewed:
            await self._renewed.wait_for(lambda: self._written >= asked)

    async def release(self) -> None:
        """Leaves the lead in order: the next one need not wait for the lease to grow old."""
        claim, self.claim = self.claim, None
        if claim is None:
            return
        with contextlib.suppress(DmscError, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                gone = claim.model_copy(update={"released": True})
                await self._bucket.update(gone, revision=self._revision, role=self._role)

    # --- the record ------------------------------------------------------------------------------------
    async def _read(self) -> tuple[Leadership | None, int]:
        """The record, None where there is none that can be read, and what an update over it must name.

        Raises:
            NewerRecord: somebody leads whose records this one does not read.
        """
        try:
            entry = await self._bucket.get(leader=True, role=self._role)
        except UnreadableRecord as error:
            return None, int(error.fields["revision"])
        if entry is None:
            return None, 0
        self._highest = max(self._highest, entry.message.term)
        return entry.message, entry.revision

    async def _write(self, claim: Leadership, revision: int) -> int:
        if revision:
            return await self._bucket.update(claim, revision=revision, role=self._role)
        return await self._bucket.create(claim, role=self._role)

    async def _write_claim(self, held: Leadership | None, revision: int, began: float) -> int:
        above = self._highest if held is not None else max(self._highest, revision)
        claim = next_claim(
            above,
            incarnation=self._bus.sender.incarnation,
            lease_s=self.config.lease_s,
            node=self._node,
            pid=os.getpid(),
        )
        self._revision = await self._write(claim, revision)
        self.claim = claim
        self.refusal = ""
        self._highest = claim.term
        self._written = began
        return claim.term

    async def _renew(self) -> str | None:
        """One renewal. Returns who leads instead, if somebody does.

        Raises:
            Unavailable: not known whether it was written; the next one finds out.
        """
        assert self.claim is not None
        began = now()
        fresh = self.claim.model_copy(update={"renewal": self.claim.renewal + 1})
        try:
            self._revision = await self._write(fresh, self._revision)
        except Conflict:
            try:
                other, revision = await self._read()
            except NewerRecord as error:
                return error.text
            if other is None and not self.sure:
                return "the record of the lease was removed, or can't be read, while this one was away"
            if other is not None and not is_same_leadership(other, self.claim):
                return f"term {other.term} is led by {other.incarnation} (pid {other.pid} on {other.node})"
            self._revision = revision  # a renewal of ours was written after all; or what nobody could read
            self._due.set()
            return None
        self.claim = fresh
        self._written = began
        async with self._renewed:
            self._renewed.notify_all()
        return None

    async def _attempt(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Not longer than `attempt_s`: a store without a leader answers nobody, not even with an error."""
        try:
            async with asyncio.timeout(self.config.attempt_s):
                return await work()
        except TimeoutError:
            raise DeadlineExceeded(f"the lease's record: no answer in {self.config.attempt_s:g} s") from None

    async def _on_reconnect(self) -> None:
        self._due.set()
