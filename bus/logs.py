"""Structured logging: readable on a terminal, JSON elsewhere, and shipped on the bus for `dmsc logs`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from bus import subjects
from schemas.base import is_token
from schemas.errors import BadMessage, Unavailable
from schemas.telemetry import LogLine

if TYPE_CHECKING:
    from bus.connection import Bus

KEPT_LINES = 2_000
"""Lines waiting to be shipped; beyond it the oldest are dropped and counted (a log must not eat memory)."""
TEXT_LIMIT = 2_000
"""Characters of one field on the bus."""

_waiting: deque[LogLine] = deque(maxlen=KEPT_LINES)
_dropped = 0
_shippers = 0


def configure_logging(*, level: str = "info", json: bool | None = None, stream: TextIO = sys.stderr) -> None:
    """Sets up structlog for this process.

    Args:
        level: debug, info, warning, error.
        json: One JSON object per line; by default unless `stream` is a terminal.
        stream: Where lines go.
    """
    as_json = not stream.isatty() if json is None else json
    renderer: list[Any] = [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    if as_json:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _keep_for_shipping,
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    # The NATS client reports each failed reconnect attempt through logging; our own lines say it once.
    logging.getLogger("nats").setLevel(logging.CRITICAL)


def log_for_people() -> None:
    """Readable lines on standard error, in a process whose logging nobody has set up."""
    if not structlog.is_configured():
        configure_logging(json=False)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `component=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


def _keep_for_shipping(_: Any, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    global _dropped
    if not _shippers or level == "debug":
        return event
    if len(_waiting) == KEPT_LINES:
        _dropped += 1
    job = str(event.get("job") or "")
    fields = {
        key: str(value)[:TEXT_LIMIT]
        for key, value in event.items()
        if key not in ("event", "level", "timestamp", "exc_info")
    }
    _waiting.append(
        LogLine(
            level=level,
            event=str(event.get("event", ""))[:TEXT_LIMIT],
            fields=fields,
            job=job if is_token(job) else None,
        )
    )
    return event


async def ship_logs(bus: Bus, *, every_s: float = 0.2) -> None:
    """Publishes this process's lines (info and above) on `subjects.LOG` until cancelled.

    The queue is bounded: under a flood the oldest lines are dropped, and their number is told in a
    line of its own. Lines of a time without the bus are kept up to the bound.
    """
    global _shippers
    _shippers += 1
    try:
        while True:
            await _ship(bus)
            await asyncio.sleep(every_s)
    finally:
        _shippers -= 1
        await _ship(bus)


async def _ship(bus: Bus) -> None:
    global _dropped
    if not bus.connected:
        return
    if _dropped:
        count, _dropped = _dropped, 0
        _waiting.append(LogLine(level="warning", event="log lines dropped", fields={"count": str(count)}))
    try:
        while _waiting:
            await bus.publish(subjects.LOG, _waiting[0], sid=bus.sender.name)
            _waiting.popleft()
    except Unavailable:
        return  # kept for when the bus is back
    except BadMessage:
        _waiting.popleft()  # one line that cannot be encoded must not block the others
