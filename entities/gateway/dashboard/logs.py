"""Searches the services' log lines on their stream, secrets out, within stated bounds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import LEVELS
from entities.gateway.dashboard.rows import Row
from schemas.redaction import redact
from schemas.telemetry import LogLine

SCANNED = 20_000
"""Lines that one search looks at; where there are more, `next` says where to go on."""
AT_ONCE = 2
"""Searches at a time; others wait their turn."""
_QUIET = ("component", "pid", "service", "job", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is wanted. `since`: seconds since the epoch; `start`: a sequence, instead of it."""

    text: str = ""
    level: str = "info"
    sid: str | None = None
    job: str | None = None
    since: float = 0.0
    start: int | None = None
    limit: int = 200

    def meets(self, line: LogLine, row: Row) -> bool:
        loud = line.level not in LEVELS or LEVELS.index(line.level) >= LEVELS.index(self.level)
        if not loud or (self.job is not None and line.job != self.job):
            return False
        wanted = self.text.casefold()
        return not wanted or wanted in f"{row['sid']} {row['event']} {row['fields']}".casefold()


class LogSearch:
    """Looks; may be asked by many at once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def search(self, wanted: Search) -> dict[str, Any]:
        """The latest `limit` lines that fit, oldest first; `next` is the sequence behind the last one seen.

        Raises:
            Unavailable: the bus is away.
        """
        tokens: dict[str, Any] = {} if wanted.sid is None else {"sid": wanted.sid}
        place: dict[str, Any] = {"start": wanted.start} if wanted.start else {"since": wanted.since}
        found: deque[Row] = deque(maxlen=wanted.limit)
        seen, last, fits = 0, (wanted.start or 1) - 1, 0
        async with self._turns:
            began = time.monotonic()
            history = self._bus.history(subjects.LOG, **place, **tokens)
            async with contextlib.aclosing(history) as lines:
                async for item in lines:
                    seen, last = seen + 1, item.sequence
                    if isinstance(item.message, LogLine):
                        row = log_row(item.message, item.envelope.sender.name, item.envelope.sent_at, last)
                        if wanted.meets(item.message, row):
                            fits += 1
                            found.append(row)
                    if seen % 200 == 0:
                        await asyncio.sleep(0)
                    if seen >= SCANNED:
                        break
        return {
            "lines": list(found),
            "scanned": seen,
            "found": fits,
            "complete": seen < SCANNED,
            "next": last + 1,
            "took_ms": round(1e3 * (time.monotonic() - began), 1),
        }


def log_row(line: LogLine, sid: str, at: float, sequence: int) -> Row:
    """One line as it is shown: without what its user's fields keep secret."""
    fields = redact(LogLine, {"fields": line.fields})["fields"]
    return {
        "sequence": sequence,
        "at": round(at, 3),
        "sid": sid,
        "level": line.level,
        "event": line.event,
        "job": line.job,
        "step": line.step,
        "correlation": line.correlation,
        "fields": " ".join(f"{key}={value}" for key, value in fields.items() if key not in _QUIET),
    }
