"""A node agent leaves: it tells the mesh, waits until nothing runs here any more, and ends (ADR-0170).

The orchestrator moves the instances. Whoever is left at the deadline is ended as by any end of an agent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import cancel
from entities.cluster.config import ClusterConfig
from schemas.cluster import LeaveNotice
from schemas.envelope import Envelope
from schemas.errors import Ack, DmscError

log = get_logger("cluster")


class AgentLeave:
    """The leave of one node agent. `busy`: whether instances run on the node."""

    def __init__(self, bus: Bus, config: ClusterConfig, busy: Callable[[], bool]) -> None:
        self._bus = bus
        self._config = config
        self._busy = busy
        self._until: float | None = None
        self._reason = ""
        self._known = False  # the orchestrator places nothing here any more
        self._tried = False  # it was told, or did not answer
        self._begun = asyncio.Event()
        self._look = asyncio.Event()

    @property
    def under_way(self) -> bool:
        """Whether the node leaves."""
        return self._until is not None

    def begin(self, deadline_s: float, reason: str, *, known: bool) -> None:
        """The node leaves within so many seconds; of several deadlines the soonest counts.

        `known`: the orchestrator says so itself.
        """
        until = time.monotonic() + deadline_s
        if self._until is None or until < self._until:
            log.info("leaving", node=self._config.sid, within_s=round(deadline_s, 1), reason=reason)
            self._until, self._reason = until, reason
            self._known = False
        self._known = self._known or known
        self._begun.set()
        self._look.set()

    async def order(self, order: LeaveNotice, envelope: Envelope) -> Ack:
        """The orchestrator says that this node leaves."""
        if order.incarnation not in (None, self._bus.sender.incarnation):
            return Ack(note="another incarnation is to leave")
        self.begin(order.deadline_s, order.reason, known=True)
        return Ack()

    def look(self) -> None:
        """An instance came or went."""
        self._look.set()

    async def ends(self, offering: asyncio.Future[Any]) -> None:
        """Returns once the node has left, and `offering` was cancelled; raises what that raises first."""
        leaving = asyncio.create_task(self._until_left())
        try:
            await asyncio.wait({offering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if offering.done():
                await offering
        finally:
            await cancel(leaving, offering)

    async def _until_left(self) -> None:
        await self._begun.wait()
        telling = asyncio.create_task(self._tell())
        try:
            while (left_s := self._left_s()) > 0 and (self._busy() or not (self._known or self._tried)):
                self._look.clear()
                try:
                    async with asyncio.timeout(left_s):
                        await self._look.wait()
                except TimeoutError:
                    break
        finally:
            await cancel(telling)
        log.info("left", node=self._config.sid, empty=not self._busy(), left_s=round(self._left_s(), 1))

    def _left_s(self) -> float:
        """Until whoever is left must be ended, so that this process is gone by the deadline."""
        assert self._until is not None
        left_s = self._until - time.monotonic()
        return left_s - min(self._config.end_s, left_s / 2)

    async def _tell(self) -> None:
        """Tells the orchestrator, until it has heard the soonest deadline."""
        times = self._config.times
        while True:
            await self._begun.wait()
            self._begun.clear()
            while not self._known:
                assert self._until is not None
                until, reason = self._until, self._reason
                notice = LeaveNotice(
                    node=self._config.sid,
                    deadline_s=max(0.0, until - time.monotonic()),
                    source="signal",
                    reason=reason,
                    by=self._config.sid,
                    incarnation=self._bus.sender.incarnation,
                )
                try:
                    await self._bus.command(
                        subjects.NODE_LEAVES,
                        notice,
                        deadline_s=times.leave_told_s,
                        cause=None,
                        sid=self._config.sid,
                    )
                except DmscError as error:  # no orchestrator leads just now
                    log.warning("leave not heard", node=self._config.sid, reason=error.text)
                    self._tried = True
                    self._look.set()
                    await asyncio.sleep(times.leave_again_s)
                else:
                    self._known = until == self._until
                    self._look.set()
