"""Search in the services' log lines on their stream, without secrets and within stated limits."""

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
"""Lines that one search reads at most; `next` is where a further search continues."""
AT_ONCE = 2
"""Searches that run at a time; others wait."""
_QUIET = ("component", "pid", "service", "job", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The conditions of a search. `since`: seconds since the epoch; `start`: a sequence, used first."""

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
        text = self.text.casefold()
        return not text or text in f"{row['sid']} {row['event']} {row['fields']}".casefold()


class LogSearch:
    """Runs log searches, `AT_ONCE` at a time."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def search(self, query: Search) -> dict[str, Any]:
        """The latest `limit` lines that match, oldest first; `next` is the sequence behind the last one read.

        Raises:
            Unavailable: the bus is away.
        """
        tokens: dict[str, Any] = {} if query.sid is None else {"sid": query.sid}
        place: dict[str, Any] = {"start": query.start} if query.start else {"since": query.since}
        rows: deque[Row] = deque(maxlen=query.limit)
        seen, last, matches = 0, (query.start or 1) - 1, 0
        async with self._turns:
            began = time.monotonic()
            history = self._bus.history(subjects.LOG, **place, **tokens)
            async with contextlib.aclosing(history) as lines:
                async for item in lines:
                    seen, last = seen + 1, item.sequence
                    if isinstance(item.message, LogLine):
                        row = log_row(item.message, item.envelope.sender.name, item.envelope.sent_at, last)
                        if query.meets(item.message, row):
                            matches += 1
                            rows.append(row)
                    if seen % 200 == 0:
                        await asyncio.sleep(0)
                    if seen >= SCANNED:
                        break
        return {
            "lines": list(rows),
            "scanned": seen,
            "found": matches,
            "complete": seen < SCANNED,
            "next": last + 1,
            "took_ms": round(1e3 * (time.monotonic() - began), 1),
        }


def log_row(line: LogLine, sid: str, at: float, sequence: int) -> Row:
    """One log line as a row, with secret fields redacted."""
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
