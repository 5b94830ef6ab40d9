"""Because of what a message is sent: the one that is being handled, and the request that it all began with.

`bus.messaging.handlers` notes each message before it calls the handler. What the handler sends, and the tasks
that it starts, then name that message as their cause, and carry its correlation, without saying so
(`codec.encode` looks here). A loop that works for a job says `correlate(record.correlation)` once; a loop
that works for nobody in particular, though a handler started it, says `stand_alone()`.

A correlation begins where somebody asks for something (`correlated()`): at a gateway's door, or in a client.
A W3C trace id is one, too (`trace_id` goes the other way), so that a caller's trace and the messages of the
mesh are found by the same word. Context variables (PEP 567) cost some tens of nanoseconds a message.
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
    """What a message follows from, where no envelope tells it.

    `id` is the message that caused it; `span` the caller's W3C span id, known only where the request came in.
    """

    id: str | None
    correlation: str | None
    span: str = ""


handling: ContextVar[Envelope | Origin | None] = ContextVar("handling", default=None)
"""The message that the present task handles, and the tasks that it starts."""


def new_correlation() -> str:
    """Short, for it travels with each message: 48 random bits."""
    return secrets.token_hex(6)


def current() -> str | None:
    """The correlation of what this task does."""
    origin = handling.get()
    return None if origin is None else origin.correlation


def current_cause() -> str | None:
    """Id of the message that this task handles."""
    origin = handling.get()
    return None if origin is None else origin.id


def caller_span() -> str:
    """The span of whoever asked over HTTP, 16 hexadecimal digits; or nothing."""
    origin = handling.get()
    return origin.span if isinstance(origin, Origin) else ""


@contextmanager
def correlated(correlation: str | None = None, *, span: str = "") -> Iterator[str]:
    """What is sent within the block carries this correlation, or a new one; no cause. Yields it."""
    name = correlation or new_correlation()
    token = handling.set(Origin(None, name, span))
    try:
        yield name
    finally:
        handling.reset(token)


def correlate(correlation: str | None, *, cause: str | None = None) -> None:
    """The rest of this task, and what it starts, belongs to `correlation`; `cause` is the message that led
    to it, if a single one did."""
    handling.set(Origin(cause, correlation or None))


def stand_alone() -> None:
    """The rest of this task is because of nothing in particular: beats, samples, lines of a log."""
    handling.set(None)


def is_correlation(text: str) -> bool:
    """Whether a caller's own word may serve: up to 64 letters, digits, `_` and `-`."""
    return _correlation.fullmatch(text) is not None


def parse_traceparent(text: str) -> tuple[str, str] | None:
    """Trace and span id of a `traceparent` header (W3C Trace Context, §3.2); None where it is none."""
    found = _traceparent.fullmatch(text.strip())
    if found is None or text.strip()[:2] == "ff" or (text.strip()[:2] == "00" and found[3]):
        return None
    trace, span = found[1], found[2]
    return None if trace == "0" * 32 or span == "0" * 16 else (trace, span)


def trace_id(correlation: str) -> str:
    """The W3C trace id of a correlation: itself, where it is one, else a hash; 32 hexadecimal digits."""
    if re.fullmatch(r"[0-9a-f]{32}", correlation) and correlation != "0" * 32:
        return correlation
    return hashlib.blake2b(correlation.encode(), digest_size=16).hexdigest()
