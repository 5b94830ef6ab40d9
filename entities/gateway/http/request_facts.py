"""What is known of a request before it is looked at: who asks, and where its correlation begins.

Each HTTP request has a correlation, the caller's own or a new one, and is told it.

`traceparent` (W3C Trace Context) makes the caller's trace id the correlation, `X-Correlation-Id` or
`X-Request-Id` any other word; what the mesh does because of the request carries it (`bus.wire.correlation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bus.wire.correlation import is_correlation, parse_traceparent

HEADERS = (b"x-correlation-id", b"x-request-id")
"""Both names are common for the same thing; an answer has both."""


@dataclass(slots=True)
class RequestFacts:
    """What is known of a request before it is looked at; in its scope under `dmsc`."""

    identity: str
    is_stream: bool = False


def asked(headers: Mapping[bytes, bytes]) -> tuple[str | None, str]:
    """The caller's correlation and span, as far as it gave usable ones. `headers`: lower-case names."""
    trace = headers.get(b"traceparent")
    if trace is not None and (parsed := parse_traceparent(trace.decode("latin-1"))) is not None:
        return parsed
    for name in HEADERS:
        own = headers.get(name, b"").decode("latin-1")
        if is_correlation(own):
            return own, ""
    return None, ""
