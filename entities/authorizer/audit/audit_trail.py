"""Writes the audit stream: one chain for all authorizers (`schemas.audit`).

A privileged act is recorded before it is permitted: without a record there is no permission. Refusals are
recorded after the answer, a few one by one and the rest as counts (`refusals.py`).
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
from entities.authorizer.audit.refusals import Refusals, new_record
from schemas.audit import AuditKind, AuditRecord, chained
from schemas.errors import Conflict, DmscError, Unavailable
from schemas.signals import AccessDecision, Role

log = get_logger("audit")


class AuditTrail:
    """Writes one authorizer's records to the chain."""

    def __init__(
        self,
        bus: Bus,
        authorizer: str,
        refusals: Refusals | None = None,
        archive: AuditArchive | None = None,
        *,
        deadline_s: float = 8.0,
        retry_s: float = 0.02,
    ) -> None:
        """Make the writer.

        Args:
            bus: the mesh's bus.
            authorizer: the authorizer's SID.
            refusals: given if others share it, too, and it outlives this.
            archive: copies the records.
            deadline_s: limit for writing one record; a cluster that elects its leader takes most of it.
            retry_s: pause before the next attempt.
        """
        self._deadline_s = deadline_s
        self._retry_s = retry_s
        self._archive = archive
        self.refusals = refusals or Refusals(authorizer)
        self._bus = bus
        self._authorizer = authorizer
        self._write_lock = asyncio.Lock()

    async def act(self, kind: AuditKind, *, request_id: str = "", **what: Any) -> None:
        """Record an act that is about to be done. Raises `Unavailable` on failure: it must not be done then.

        `request_id` is the envelope id of the request. A repeated request may reach several authorizers, and
        the stream keeps one record of it.
        """
        id = _record_id(request_id, kind, what) if request_id else None
        try:
            await self._write(new_record(self._authorizer, kind, id=id, allow=True, **what))
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
        """Queue the record of a refusal. `user` is empty if unknown. Never raises and never waits."""
        refusal = Refusal(user=user, action=action, resource=resource, reason=reason)
        self.refusals.add(user, "refused", refusal, role=role, rule=rule, gateway=gateway)

    async def run(self) -> None:
        """Write refusals until cancelled; waiting ones are then still written, within a second."""
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
            # It stays queued until it is written; with its id it is stored once, however often it is tried.
            await self._write_or_count(self.refusals.waiting[0])
            self.refusals.waiting.popleft()
        if window_over:
            for record in self.refusals.close():
                await self._write_or_count(record)

    async def _write_or_count(self, record: AuditRecord) -> None:
        """Write a refusal's record; a failure is counted and logged, as nobody waits for the record."""
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
        """Append a record to the chain; it may take several attempts, as other authorizers write as well."""
        failure: DmscError | None = None
        async with self._write_lock:
            deadline = time.monotonic() + self._deadline_s
            while time.monotonic() < deadline:
                try:
                    last, before = await self._bus.tail(subjects.AUDIT)
                    if self._archive is not None:
                        self._archive.admit(last)
                    message = before.message if before is not None else None
                    record_in_chain = chained(
                        record, last + 1, message if isinstance(message, AuditRecord) else None
                    )
                    number = await self._bus.append_behind(
                        subjects.AUDIT,
                        record_in_chain,
                        message_id=record.id,
                        last=last,
                        authorizer=self._authorizer,
                    )
                    if self._archive is not None:
                        self._archive.wrote()
                    return number
                except Conflict:
                    failure = None
                except Unavailable as error:
                    failure = error
                await asyncio.sleep(self._retry_s * random.uniform(0.5, 1.5))
        raise failure or Unavailable("other authorizers write at the same time")


def _record_id(request_id: str, kind: AuditKind, what: dict[str, Any]) -> str:
    """The id of an act's record. It depends on the act, so acts with the same envelope id hide no other."""
    text = json.dumps([request_id, kind, what], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def about(decision: AccessDecision, action: str, resource: str, gateway: str) -> dict[str, Any]:
    """The fields of a decision in an audit record."""
    return {
        "user": decision.user,
        "role": decision.role,
        "action": action,
        "resource": resource,
        "reason": decision.reason,
        "rule": decision.rule,
        "gateway": gateway,
    }
