"""Leader election for a role (orchestrator, registry): claim, renew, confirm, release. Rules: `lease.py`.

A leader that could not renew in time decides nothing (`confirmed` waits) until its next renewal has a result.
If that renewal succeeds, nobody else has led meanwhile, because the compare-and-set names the leader's own
revision. If another candidate has the next term, the lead is lost (`keep` returns). This holds for a leader
that was frozen or cut off, and for one whose server was away.

A holder that is certain of its lead rewrites a record that can't be read or was removed. A holder that is not
certain gives up the lead, because somebody else may have led meanwhile. A candidate that meets such a record
waits a whole lease for its holder to rewrite it. Then it takes a term above every earlier one: each term took
a write, so no term is above the record's revision.
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
    certain_until,
    claimable,
    is_same_leadership,
    next_claim,
)
from schemas.errors import Conflict, DeadlineExceeded, DmscError, NewerRecord, UnreadableRecord
from schemas.leadership import Leadership

log = get_logger("leadership")

_Result = TypeVar("_Result")


def now() -> float:
    """Seconds of a monotonic clock, one that also counts while the machine sleeps where there is one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


class LeaderCandidate:
    """One candidate for the lead of a `role`; `term` is 0 while it does not lead."""

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
        self._written = 0.0  # start of the last successful write
        self._renewed = asyncio.Condition()
        self._due = asyncio.Event()
        self._highest = 0  # highest term seen
        self.refusal = ""
        """Why this candidate can't stand for the lead; empty if it can."""
        bus.on_reconnect(self._on_reconnect)

    @property
    def term(self) -> int:
        return self.claim.term if self.claim is not None else 0

    @property
    def is_certain(self) -> bool:
        """Whether this candidate leads and nobody else can have the lead at this moment."""
        return self.claim is not None and now() < certain_until(self._written, self.claim.lease_s)

    async def win(self) -> int:
        """Wait until this candidate leads; return the term."""
        silence = Silence(self.config.check_s)
        while True:
            try:
                began = now()
                record, revision = await self._attempt(self._read)
                silence_s = silence.observe(revision, now())
                if (
                    claimable(record, silence_s)
                    if record is not None
                    else (not (revision or self._highest) or silence_s >= self.config.lease_s)
                ):
                    began = now()
                    return await self._attempt(lambda: self._write_claim(record, revision, began))  # noqa: B023  # awaited in the same round
                self.refusal = ""
            except NewerRecord as error:
                if not self.refusal:
                    log.error("this replica does not lead", role=self._role, reason=error.text)
                self.refusal = error.text
            except Conflict as error:
                log.info("another candidate was quicker", reason=error.text)
            except DmscError as error:
                log.debug("the lease can't be read", reason=error.text)
                silence.interrupt()
            await asyncio.sleep(max(0.0, began + self.config.check_s - now()))

    async def keep(self) -> str:
        """Renew until another candidate leads; return a text that names it. Cancel it to stop."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.renew_s):
                    await self._due.wait()
            self._due.clear()
            try:
                if (successor := await self._attempt(self._renew)) is not None:
                    self.claim = None
                    return successor
            except DmscError as error:
                log.debug("the lease was not renewed", term=self.term, reason=error.text)

    async def confirmed(self) -> None:
        """Return at once while the lead is certainly ours; else wait for a successful renewal, or for ever.

        That renewal must have begun after this call: the answer to an earlier one may have lain in our socket
        while this process was frozen. If the lead is lost, the caller is cancelled here and so answers
        nobody.
        """
        if self.is_certain:
            return
        start = now()
        self._due.set()
        async with self._renewed:
            await self._renewed.wait_for(lambda: self._written >= start)

    async def release(self) -> None:
        """Give up the lead, so that the next candidate need not wait for the lease to expire."""
        claim, self.claim = self.claim, None
        if claim is None:
            return
        with contextlib.suppress(DmscError, TimeoutError):
            async with asyncio.timeout(self.config.release_s):
                release = claim.model_copy(update={"released": True})
                await self._bucket.update(release, revision=self._revision, role=self._role)

    # --- the record ------------------------------------------------------------------------------------
    async def _read(self) -> tuple[Leadership | None, int]:
        """The record (None if there is no readable one), and the revision that an update must name.

        Raises:
            NewerRecord: the leader's record has a newer version than this process can read.
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

    async def _write_claim(self, record: Leadership | None, revision: int, began: float) -> int:
        highest = self._highest if record is not None else max(self._highest, revision)
        claim = next_claim(
            highest,
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
        """Renew once. Returns a text that names the new leader, if there is one.

        Raises:
            Unavailable: it is unknown whether the renewal was written; the next renewal finds out.
        """
        assert self.claim is not None
        began = now()
        renewed = self.claim.model_copy(update={"renewal": self.claim.renewal + 1})
        try:
            self._revision = await self._write(renewed, self._revision)
        except Conflict:
            try:
                other, revision = await self._read()
            except NewerRecord as error:
                return error.text
            if other is None and not self.is_certain:
                return "the record of the lease was removed, or can't be read, while this one was away"
            if other is not None and not is_same_leadership(other, self.claim):
                return f"term {other.term} is led by {other.incarnation} (pid {other.pid} on {other.node})"
            self._revision = revision  # our own renewal was written after all, or it is unreadable
            self._due.set()
            return None
        self.claim = renewed
        self._written = began
        async with self._renewed:
            self._renewed.notify_all()
        return None

    async def _attempt(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run `work` for at most `attempt_s`: a store without a leader does not answer, not even an error."""
        try:
            async with asyncio.timeout(self.config.attempt_s):
                return await work()
        except TimeoutError:
            raise DeadlineExceeded(f"the lease's record: no answer in {self.config.attempt_s:g} s") from None

    async def _on_reconnect(self) -> None:
        self._due.set()
