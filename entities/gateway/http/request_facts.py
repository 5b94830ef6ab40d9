"""Facts of a request that are known before it is handled: its identity and its correlation.

Each HTTP request has a correlation, the caller's own or a new one; the answer states it. With `traceparent`
(W3C Trace Context) it is the caller's trace id; with `X-Correlation-Id` or `X-Request-Id` it is any token.
All that the mesh does because of the request carries it (`bus.wire.correlation`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from bus.wire.correlation import is_correlation, parse_traceparent

HEADERS = (b"x-correlation-id", b"x-request-id")
"""Two common names of the same header; an answer has both."""


@dataclass(slots=True)
class RequestFacts:
    """Facts of a request, in its ASGI scope under `dmsc`. `identity`: a user or an address, for limits.

    `leave` ends the request's count as open, before its answer: it waits for others, and counts elsewhere.
    `charge` takes one more request from the identity's bucket, and says whether there was one.
    `keep` counts bytes of the body that stay in memory until the answer is over. Raises `RateLimited` or
    `Overloaded`.
    `downloads` counts the answer as a file's, for the length of the block. Raises `RateLimited`.
    """

    identity: str
    is_stream: bool = False
    leave: Callable[[], None] = lambda: None
    charge: Callable[[], bool] = lambda: True
    keep: Callable[[int], None] = lambda size: None
    downloads: Callable[[], AbstractContextManager[None]] = nullcontext


def caller_correlation(headers: Mapping[bytes, bytes]) -> tuple[str | None, str]:
    """The caller's correlation (None without a usable one) and span. `headers`: with lower-case names."""
    trace = headers.get(b"traceparent")
    if trace is not None and (parsed := parse_traceparent(trace.decode("latin-1"))) is not None:
        return parsed
    for name in HEADERS:
        own = headers.get(name, b"").decode("latin-1")
        if is_correlation(own):
            return own, ""
    return None, ""
