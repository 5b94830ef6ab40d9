"""Refusals on their way to the audit stream: from before there is a bus, bounded, and in nobody's way.

The first of each group wait here to be written, the rest are counted (`folding.py`); `audit_trail.py` writes
what waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Hashable
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
"""Refusals that wait to be written; beyond, they are only counted."""
EVERYBODY_ELSE = "*"
"""Who is named where a record counts refusals of several."""
_SHORT = 200


class Refusals:
    """Those of one authorizer at one door."""

    def __init__(self, authorizer: str, config: RateLimitedRecordsConfig | None = None) -> None:
        self.unwritten = 0
        self.waiting: deque[AuditRecord] = deque()
        """To be written, oldest first; whoever has written one takes it off."""
        self._authorizer = authorizer
        self._folding = RateLimitedRecords(config or RateLimitedRecordsConfig())
        self._news = asyncio.Event()

    def add(self, group: Hashable, kind: AuditKind, refusal: Refusal, **more: Any) -> None:
        """`more`: further fields of the record. Never raises, never waits."""
        if self._folding.take(group, refusal, time.monotonic()):
            if len(self.waiting) < WAITING:
                self.waiting.append(made(self._authorizer, kind, **_fields(refusal), **more))
            else:
                self.unwritten += 1
        self._news.set()

    def close(self) -> list[AuditRecord]:
        """Ends the window; what tells how many were only counted in it."""
        return [
            made(self._authorizer, "folded", count=one.count, **_fields(one.last, one))
            for one in self._folding.close()
        ]

    async def news(self) -> bool:
        """Returns when there is something to do; True: the window has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._folding.due(time.monotonic())):
                await self._news.wait()
        self._news.clear()
        return self._folding.due(time.monotonic()) == 0.0


def made(authorizer: str, kind: AuditKind, *, id: str | None = None, **what: Any) -> AuditRecord:
    """A record that is no link of the chain yet; without `id`, unlike any other."""
    short = {
        key: value[:_SHORT] if isinstance(value, str) and not isinstance(value, Role) else value
        for key, value in what.items()
    }
    return AuditRecord(
        id=id or secrets.token_hex(8), at=time.time(), authorizer=authorizer, kind=kind, **short
    )


def _fields(refusal: Refusal, folded: AggregatedRefusals | None = None) -> dict[str, str]:
    user = EVERYBODY_ELSE if folded is not None and folded.others else refusal.user
    return {
        "user": user,
        "action": refusal.action,
        "resource": refusal.resource,
        "reason": refusal.reason,
    }
