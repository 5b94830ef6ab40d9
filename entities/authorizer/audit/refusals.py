"""A bounded queue of refusals for the audit stream, usable before there is a bus and without waiting.

The first refusals of each group are queued here, the rest are counted (`rate_limited_records.py`);
`audit_trail.py` writes the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import asdict
from typing import Any

from entities.authorizer.audit.rate_limited_records import (
    AggregatedRefusals,
    RateLimitedRecords,
    RateLimitedRecordsConfig,
    Refusal,
)
from schemas.audit import AuditKind, AuditRecord
from schemas.signals import Role

WAITING = 256
"""Most queued refusals; further ones are only counted."""
EVERYBODY_ELSE = "*"
"""The user in a record that counts refusals of several users."""
_SHORT = 200


class Refusals:
    """The refusals of one authorizer, of requests or of connections."""

    def __init__(self, authorizer: str, config: RateLimitedRecordsConfig | None = None) -> None:
        self.unwritten = 0
        self.waiting: deque[AuditRecord] = deque()
        """The records to be written, oldest first; the writer removes each after writing it."""
        self._authorizer = authorizer
        self._limiter = RateLimitedRecords(config or RateLimitedRecordsConfig())
        self._changed = asyncio.Event()

    def add(self, group: Hashable, kind: AuditKind, refusal: Refusal, **more: Any) -> None:
        """Add a refusal; `more` has further fields of the record. Never raises, never waits."""
        if self._limiter.take(group, refusal, time.monotonic()):
            if len(self.waiting) < WAITING:
                self.waiting.append(new_record(self._authorizer, kind, **_fields(refusal), **more))
            else:
                self.unwritten += 1
        self._changed.set()

    def close(self) -> list[AuditRecord]:
        """End the window; return the records of refusals that were only counted."""
        return [
            new_record(
                self._authorizer, "folded", count=aggregate.count, **_fields(aggregate.last, aggregate)
            )
            for aggregate in self._limiter.close()
        ]

    async def news(self) -> bool:
        """Wait until there is something to write; True if the window has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limiter.due(time.monotonic())):
                await self._changed.wait()
        self._changed.clear()
        return self._limiter.due(time.monotonic()) == 0.0


def new_record(authorizer: str, kind: AuditKind, *, id: str | None = None, **fields: Any) -> AuditRecord:
    """A record that is not in the chain yet; without `id` it gets a unique one."""
    short_fields = {
        key: value[:_SHORT] if isinstance(value, str) and not isinstance(value, Role) else value
        for key, value in fields.items()
    }
    return AuditRecord(
        id=id or secrets.token_hex(8), at=time.time(), authorizer=authorizer, kind=kind, **short_fields
    )


def _fields(refusal: Refusal, aggregate: AggregatedRefusals | None = None) -> dict[str, str]:
    fields: dict[str, str] = asdict(refusal)
    return fields | {"user": EVERYBODY_ELSE} if aggregate is not None and aggregate.others else fields
