"""The cause and the correlation of what a task sends: the message that it handles, and the first request.

`bus.messaging.handlers` sets each message here before it calls the handler. Messages from the handler, and
from tasks that it starts, then name that message as their cause and carry its correlation by themselves
(`codec.encode` looks here). A loop that works for a job calls `correlate(record.correlation)` once. A loop
that was started by a handler but works for nobody in particular calls `stand_alone()`.

A correlation begins with a user's request (`correlated()`): at a gateway's HTTP API, or in a client. A W3C
trace id can be a correlation (`trace_id` is the way back), so that a caller's trace and the messages of the
mesh have the same id. Context variables (PEP 567) cost some tens of nanoseconds a message.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from schemas.envelope import Envelope

_traceparent = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_correlation = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Origin(NamedTuple):
    """The cause and correlation of a task that handles no message.

    `id` is the message that caused it. `span` is the caller's W3C span id, known only where the request came
    in.
    """

    id: str | None
    correlation: str | None
    span: str = ""


handling: ContextVar[Envelope | Origin | None] = ContextVar("handling", default=None)
"""The message or origin that the present task, and the tasks that it starts, work for."""


def new_correlation() -> str:
    """A new correlation of 48 random bits; it is short because each message carries it."""
    return secrets.token_hex(6)


def current() -> str | None:
    """The correlation of this task."""
    origin = handling.get()
    return None if origin is None else origin.correlation


def current_cause() -> str | None:
    """The id of the message that this task handles."""
    origin = handling.get()
    return None if origin is None else origin.id


def caller_span() -> str:
    """The W3C span id of the caller over HTTP, 16 hexadecimal digits; empty if there is none."""
    origin = handling.get()
    return origin.span if isinstance(origin, Origin) else ""


@contextmanager
def correlated(correlation: str | None = None, *, span: str = "") -> Iterator[str]:
    """Gives all messages within the block this correlation, or a new one, and no cause; yields it."""
    name = correlation or new_correlation()
    token = handling.set(Origin(None, name, span))
    try:
        yield name
    finally:
        handling.reset(token)


def correlate(correlation: str | None, *, cause: str | None = None) -> None:
    """Sets the correlation of the rest of this task and of the tasks that it starts.

    `cause` is the message that led to it, if there is a single one.
    """
    handling.set(Origin(cause, correlation or None))


def stand_alone() -> None:
    """Removes cause and correlation for the rest of this task, for heartbeats, samples or log lines."""
    handling.set(None)


def is_correlation(text: str) -> bool:
    """Whether a caller's own text may be a correlation: up to 64 letters, digits, `_` and `-`."""
    return _correlation.fullmatch(text) is not None


def parse_traceparent(text: str) -> tuple[str, str] | None:
    """The trace and span id of a `traceparent` header (W3C Trace Context, §3.2); None if it is invalid."""
    match = _traceparent.fullmatch(text.strip())
    if match is None or text.strip()[:2] == "ff" or (text.strip()[:2] == "00" and match[3]):
        return None
    trace, span = match[1], match[2]
    return None if trace == "0" * 32 or span == "0" * 16 else (trace, span)


def trace_id(correlation: str) -> str:
    """The W3C trace id of a correlation, 32 hexadecimal digits: itself if it is one, else a hash."""
    if re.fullmatch(r"[0-9a-f]{32}", correlation) and correlation != "0" * 32:
        return correlation
    return hashlib.blake2b(correlation.encode(), digest_size=16).hexdigest()
