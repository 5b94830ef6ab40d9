"""Writes the audit stream: one chain for all authorizers (`schemas.audit`).

A privileged act is recorded before it is permitted: without a record there is no permission. Refusals are
recorded behind the answer, a few by themselves and the rest counted (`refusals.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import time
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.authorizer.audit.audit_archive import AuditArchive
from entities.authorizer.audit.rate_limited_records import Refusal
from entities.authorizer.audit.refusals import Refusals, made
from schemas.audit import AuditKind, AuditRecord, chained
from schemas.errors import Conflict, DmscError, Unavailable
from schemas.signals import AccessDecision, Role

log = get_logger("audit")

DEADLINE_S = 8.0
"""How long one record may take; a cluster that elects a leader takes most of it."""
PAUSE_S = 0.02


class AuditTrail:
    """One authorizer's part in the chain."""

    def __init__(
        self,
        bus: Bus,
        authorizer: str,
        refusals: Refusals | None = None,
        archive: AuditArchive | None = None,
    ) -> None:
        """`refusals`: those that it writes, where somebody else has them, too; they outlive it. `archive`:
        keeps up with what is written."""
        self._archive = archive
        self.refusals = refusals or Refusals(authorizer)
        self._bus = bus
        self._authorizer = authorizer
        self._turn = asyncio.Lock()

    async def act(self, kind: AuditKind, *, asked: str = "", **what: Any) -> None:
        """Records what is about to be done. Raises `Unavailable` where it can't: then it must not be.

        `asked`: the envelope id of the request. One that is repeated may reach several authorizers, and the
        stream keeps one record of it.
        """
        id = _id(asked, kind, what) if asked else None
        try:
            await self._write(made(self._authorizer, kind, id=id, allow=True, **what))
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
        role: Role | None = None,
        rule: str = "",
        gateway: str = "",
    ) -> None:
        """Records a refusal, behind the scenes. `user` is empty where it is not known. Never raises."""
        refusal = Refusal(user=user, action=action, resource=resource, reason=reason)
        self.refusals.add(user, "refused", refusal, role=role, rule=rule, gateway=gateway)

    async def run(self) -> None:
        """Writes refusals until cancelled; what waits then is still written, if that takes no time."""
        try:
            await self._write_refusals(window_over=False)
            while True:
                await self._write_refusals(window_over=await self.refusals.news())
        finally:
            with contextlib.suppress(DmscError, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(1.0):
                    await self._write_refusals(window_over=True)

    async def _write_refusals(self, *, window_over: bool) -> None:
        while self.refusals.waiting:
            await self._try(self.refusals.waiting[0])  # stays until then: it is stored once, however often
            self.refusals.waiting.popleft()
        if window_over:
            for record in self.refusals.close():
                await self._try(record)

    async def _try(self, record: AuditRecord) -> None:
        """Nobody waits for a refusal's record: one that can't be written is counted, and told by the log."""
        try:
            await self._write(record)
        except DmscError as error:
            self.refusals.unwritten += record.count
            log.error(
                "audit record not written",
                kind=record.kind,
                user=record.user,
                action=record.action,
                resource=record.resource,
                reason=error.text,
            )

    async def _write(self, record: AuditRecord) -> int:
        """Behind whatever is last; other authorizers write as well, so it may take several attempts."""
        failure: DmscError | None = None
        async with self._turn:
            deadline = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline:
                try:
                    last, before = await self._bus.tail(subjects.AUDIT)
                    if self._archive is not None:
                        self._archive.admit(last)
                    said = before.message if before is not None else None
                    linked = chained(record, last + 1, said if isinstance(said, AuditRecord) else None)
                    number = await self._bus.append_behind(
                        subjects.AUDIT, linked, message_id=record.id, last=last, authorizer=self._authorizer
                    )
                    if self._archive is not None:
                        self._archive.wrote()
                    return number
                except Conflict:
                    failure = None
                except Unavailable as error:
                    failure = error
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))
        raise failure or Unavailable("other authorizers write at the same time")


def _id(asked: str, kind: AuditKind, what: dict[str, Any]) -> str:
    """With the act in it: an asker that gives several acts one envelope id hides none of them."""
    text = json.dumps([asked, kind, what], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
