"""Tells the accountant whom this gateway has answered (ADR-0160)."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from bus import subjects
from bus.connection import Bus
from entities.gateway.accounts.use_meter import UseMeter
from entities.gateway.generation.session import GenerationSession
from schemas.accounts import UseReport
from schemas.errors import DmscError
from schemas.services.generation import Generation


class UseReports:
    """The reports of one gateway.

    Args:
        bus: The bus.
        gateway: Its SID.
        every_s: Between two reports while there is something to say: so much is lost with a killed gateway.
    """

    def __init__(self, bus: Bus, gateway: str, every_s: float = 5.0) -> None:
        self._bus = bus
        self._gateway = gateway
        self._every_s = every_s
        self._meter = UseMeter()
        self._number = 0
        self._epoch_s = time.time() - time.monotonic()

    def _now(self) -> float:
        """The time by a clock that nobody sets, which began as the system's."""
        return self._epoch_s + time.monotonic()

    def session(self, session: GenerationSession) -> None:
        """A session begins or goes on here: its last writer counts all of its tokens once it is over."""
        session.on_end(lambda tokens: self._over(session, tokens))

    def _over(self, session: GenerationSession, tokens: int) -> None:
        generation, finish = session.generation, session.finished
        if generation.mirrored or finish is None or finish.ended == "fenced":
            return  # nobody asked for it; or whoever goes on with it counts it
        before = generation.charged  # its client came back for what it had not read
        prompt = len(generation.prompt) if before is None and (session.machine.is_bound or tokens) else 0
        more = max(0, tokens - (before or 0))
        if prompt or more:
            self._meter.add(generation.job, generation.user, self._now(), prompt_tokens=prompt, tokens=more)

    def predicted(self, generation: Generation) -> None:
        """A request for tensors was answered."""
        self._meter.add(generation.job, generation.user, self._now())

    async def run(self) -> None:
        """Reports until cancelled, and what is not told yet at the end."""
        try:
            while True:
                await asyncio.sleep(self._every_s)
                await self._report()
        finally:
            await self._report()

    async def _report(self) -> None:
        now = self._now()
        if not (uses := self._meter.told(now)):
            return
        report = UseReport(
            gateway=self._gateway,
            incarnation=self._bus.sender.incarnation,
            number=self._number,
            at=now,
            uses=uses,
        )
        self._number += 1
        with suppress(DmscError):  # the next report says the same, and more
            await self._bus.publish(subjects.USE_REPORT, report, gateway=self._gateway)
