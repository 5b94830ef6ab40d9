"""Structured logging: readable on a terminal, JSON elsewhere, and kept for the bus (`bus.log_shipping`).

Every line carries by itself what its task works on (`bind`: service, job, step), the request with which it
all began (`correlation`), and the id of the message that is being handled (`cause`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import structlog

from bus.wire.correlation import handling
from bus.wire.secret_urls import hidden
from schemas.base import is_token
from schemas.errors import BadInput
from schemas.plain_text import plain
from schemas.telemetry import LogLine

LEVELS = ("debug", "info", "warning", "error", "critical")
KEPT_LINES = 2_000
"""Most lines of one service that wait to be shipped. Beyond it the oldest are dropped and counted, so that
logs do not fill memory."""
TEXT_LIMIT = 2_000
"""Most characters of one field on the bus."""


@dataclass(slots=True)
class LogCounts:
    """The log lines of this process since it began."""

    lines: Counter[str] = field(default_factory=Counter)
    dropped: int = 0


counted = LogCounts()

_bound: ContextVar[Mapping[str, Any] | None] = ContextVar("bound", default=None)
_bound_process: dict[str, Any] = {}
own_sending: ContextVar[bool] = ContextVar("own_sending", default=False)


class ShippingBuffer:
    """The lines that wait, by service; "" stands for services that do not ship their own lines.

    `lines_per_s` and `burst_lines` bound the lines below `error` that a process ships, in the long run and at
    once: a loop that logs all the time must not push the others' lines off the bounded stream.
    """

    def __init__(self, *, lines_per_s: float = 200.0, burst_lines: float = 2_000.0) -> None:
        self._lines_per_s, self._burst_lines = lines_per_s, burst_lines
        self.level = LEVELS.index("info")
        self.waiting: dict[str, deque[LogLine]] = {}
        self.shippers: Counter[str] = Counter()
        self.dropped = 0
        self._allowance, self._refilled_at = burst_lines, time.monotonic()

    def may_ship(self, level: str) -> bool:
        """Whether the rate limit, a token bucket (Turner 1986), allows a line; errors are always allowed."""
        if level in ("error", "critical"):
            return True
        now = time.monotonic()
        gained = (now - self._refilled_at) * self._lines_per_s
        self._allowance, self._refilled_at = min(self._burst_lines, self._allowance + gained), now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def keep(self, service: str, line: LogLine) -> None:
        queue = self.waiting.setdefault(service, deque(maxlen=KEPT_LINES))
        if len(queue) == KEPT_LINES:
            self.drop()
        queue.append(line)

    def drop(self) -> None:
        self.dropped += 1
        counted.dropped += 1


shipping = ShippingBuffer()


class _ForgivingStream:
    """A stream whose disk may be full: the line is lost then, but logging raises nothing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except OSError:
            counted.dropped += 1

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logging(
    *, level: str = "info", json: bool | None = None, stream: TextIO = sys.stderr, ship_level: str = ""
) -> None:
    """Sets up structlog for this process.

    Args:
        level: debug, info, warning, error.
        json: Whether to write one JSON object per line; by default unless `stream` is a terminal.
        stream: Where lines go.
        ship_level: The lowest level that also goes to the bus; by default `$DMSC_LOG_SHIP_LEVEL`, else info.

    Raises:
        BadInput: there is no such level.
    """
    level_to_ship = ship_level or os.environ.get("DMSC_LOG_SHIP_LEVEL") or "info"
    if level_to_ship not in LEVELS:
        raise BadInput(f"DMSC_LOG_SHIP_LEVEL={level_to_ship}: use one of {', '.join(LEVELS)}")
    shipping.level = LEVELS.index(level_to_ship)
    as_json = not stream.isatty() if json is None else json
    # Rich tracebacks show variables, which may be secrets, and drawing them keeps the event loop for seconds.
    plain = structlog.dev.plain_traceback
    renderer: list[Any] = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]
    if as_json:
        renderer = [
            structlog.processors.format_exc_info,
            _without_secrets,
            structlog.processors.JSONRenderer(default=str),
        ]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_bound,
            _without_control_characters,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _keep_for_shipping,
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _ForgivingStream(stream))),
        cache_logger_on_first_use=False,
    )
    # The NATS client reports each failed reconnect attempt through logging; our own lines say it once.
    logging.getLogger("nats").setLevel(logging.CRITICAL)


def log_for_people() -> None:
    """Sets up readable lines on standard error, if nobody has configured logging yet."""
    if not structlog.is_configured():
        configure_logging(json=False)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `component=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


# --- what a line is about ----------------------------------------------------------------------------------
def bind(**fields: Any) -> None:
    """Adds fields to the lines of this task and of the tasks that it starts from now on.

    A line's own fields take precedence. A value may be a function without arguments, which is called for each
    line, because a step number changes. `service` also decides whose line it is on the bus, if that service
    ships its own lines (`ship_logs`).
    """
    _bound.set({**(_bound.get() or {}), **fields})


def bind_process(**fields: Any) -> None:
    """Adds fields to all lines of this process and its threads; for a process that works for one job."""
    _bound_process.update(fields)


def _add_bound(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for fields in (_bound.get(), _bound_process):
        for key, value in (fields or {}).items():
            if key not in event:
                event[key] = value() if callable(value) else value
    origin = handling.get()
    if origin is not None:
        if origin.correlation is not None:
            event.setdefault("correlation", origin.correlation)
        if origin.id is not None:
            event.setdefault("cause", origin.id)
    return event


def _without_control_characters(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Removes control characters, and replaces secrets that this process was given by their names.

    Names, hosts and subjects come from others; none of them may control a terminal or begin a line.
    """
    for key, value in event.items():
        if key != "exc_info":
            event[key] = _sanitized(value)
    return event


def _without_secrets(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Removes secrets from a traceback: users' code may raise errors that quote what it was given."""
    if isinstance(event.get("exception"), str):
        event["exception"] = hidden(event["exception"])
    return event


def _sanitized(value: Any) -> Any:
    match value:
        case str():
            return hidden(plain(value))
        case list() | tuple() | set() | frozenset():
            return [_sanitized(element) for element in value]
        case dict():
            return {plain(str(key)): _sanitized(element) for key, element in value.items()}
    return value


# --- towards the bus
# --------------------------------------------------------------------------------------------
def _keep_for_shipping(_: Any, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    counted.lines[level] += 1
    if not shipping.shippers or own_sending.get():
        return event  # lines of the shipping itself must not be shipped
    if LEVELS.index(level if level in LEVELS else "info") < shipping.level or level == "debug":
        return event
    if not shipping.may_ship(level):
        shipping.drop()
        return event
    service = (_bound.get() or {}).get("service", "")
    shipping.keep(service if service in shipping.shippers else "", _line(level, event))
    return event


def _line(level: str, event: Mapping[str, Any]) -> LogLine:
    job, step = str(event.get("job") or ""), event.get("step")
    correlation, cause = event.get("correlation"), event.get("cause")
    fields = {
        key: str(value)[:TEXT_LIMIT]
        for key, value in event.items()
        if key not in ("event", "level", "timestamp", "exc_info", "correlation", "cause")
    }
    return LogLine(
        level=level,
        event=str(event.get("event", ""))[:TEXT_LIMIT],
        fields=fields,
        job=job if is_token(job) else None,
        step=step if isinstance(step, int) else None,
        correlation=None if correlation is None else str(correlation)[:TEXT_LIMIT],
        cause=None if cause is None else str(cause)[:TEXT_LIMIT],
    )
