"""Writes the audit stream: one chain for all authorizers (`schemas.audit`).

A privileged act is recorded before it is permitted: without a record there is no permission. Refusals are
recorded behind the answer, a few by themselves and the rest counted (`folding.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.authorizer.folding import Folded, Folding, FoldingConfig
from schemas.audit import AuditKind, AuditRecord, chained
from schemas.errors import Conflict, DmscError, Unavailable
from schemas.signals import AccessDecision, Role

log = get_logger("audit")

DEADLINE_S = 8.0
"""How long one record may take; a cluster that elects a leader takes most of it."""
PAUSE_S = 0.02
WAITING = 256
"""Refusals that wait to be written; beyond, they are counted with the folded ones."""
_SHORT = 200


class AuditTrail:
    """One authorizer's part in the chain."""

    def __init__(self, bus: Bus, authorizer: str, folding: FoldingConfig | None = None) -> None:
        self._bus = bus
        self._authorizer = authorizer
        self._folding = Folding(folding or FoldingConfig())
        self._refused: asyncio.Queue[AuditRecord] = asyncio.Queue(WAITING)
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self.unwritten = 0

    async def act(self, kind: AuditKind, **what: Any) -> None:
        """Records what is about to be done. Raises `Unavailable` where it can't: then it must not be."""
        try:
            await self._write(self._record(kind, allow=True, **what))
        except DmscError as error:
            raise Unavailable(
                f"not done: the audit stream can't be written ({error.text}); try again"
            ) from error

    def refused(
        self,
        *,
        user: str,
        action: str,
        resource: str,
        reason: str,
        kind: AuditKind = "refused",
        role: Role | None = None,
        rule: str = "",
        gateway: str = "",
    ) -> None:
        """Records a refusal, behind the scenes. `user` is empty where it is not known. Never raises."""
        if self._folding.take(user, action, resource, reason, time.monotonic()):
            record = self._record(
                kind, user=user, action=action, resource=resource, reason=reason, role=role, rule=rule,
                gateway=gateway,
            )  # fmt: skip
            try:
                self._refused.put_nowait(record)
            except asyncio.QueueFull:
                self.unwritten += 1
        self._news.set()

    async def run(self) -> None:
        """Writes refusals until cancelled; what waits then is still written, if that takes no time."""
        try:
            while True:
                self._news.clear()
                await self._write_refusals()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._folding.due(time.monotonic())):
                        await self._news.wait()
                if self._folding.due(time.monotonic()) == 0.0:
                    await self._tell(self._folding.close())
        finally:
            with contextlib.suppress(DmscError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(1.0):
                    await self._write_refusals()
                    await self._tell(self._folding.close())

    async def _write_refusals(self) -> None:
        while not self._refused.empty():
            await self._try(self._refused.get_nowait())

    async def _tell(self, folded: list[Folded]) -> None:
        for one in folded:
            record = self._record(
                "folded", user=one.user, action=one.action, resource=one.resource, reason=one.reason,
                count=one.count,
            )  # fmt: skip
            await self._try(record)

    async def _try(self, record: AuditRecord) -> None:
        """Nobody waits for a refusal's record: one that can't be written is counted, and told by the log."""
        try:
            await self._write(record)
        except DmscError as error:
            self.unwritten += 1
            log.error("audit record not written", kind=record.kind, user=record.user, action=record.action,
                      resource=record.resource, reason=error.text)  # fmt: skip

    def _record(self, kind: AuditKind, **what: Any) -> AuditRecord:
        short = {
            key: value[:_SHORT] if isinstance(value, str) and not isinstance(value, Role) else value
            for key, value in what.items()
        }
        return AuditRecord(
            id=secrets.token_hex(8), at=time.time(), authorizer=self._authorizer, kind=kind, **short
        )

    async def _write(self, record: AuditRecord) -> int:
        """Behind whatever is last; other authorizers write as well, so it may take several attempts."""
        failure: DmscError | None = None
        async with self._turn:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                try:
                    last, before = await self._bus.tail(subjects.AUDIT)
                    said = before.message if before is not None else None
                    linked = chained(record, last + 1, said if isinstance(said, AuditRecord) else None)
                    return await self._bus.append_behind(
                        subjects.AUDIT, linked, message_id=record.id, last=last, authorizer=self._authorizer
                    )
                except Conflict:
                    failure = None
                except Unavailable as error:
                    failure = error
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))
        raise failure or Unavailable("other authorizers write at the same time")


def about(decision: AccessDecision, action: str, resource: str, gateway: str) -> dict[str, Any]:
    """A decision as a record tells it."""
    return {
        "user": decision.user,
        "role": decision.role,
        "action": action,
        "resource": resource,
        "reason": decision.reason,
        "rule": decision.rule,
        "gateway": gateway,
    }
