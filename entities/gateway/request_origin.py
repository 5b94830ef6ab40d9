"""Where a correlation begins: each HTTP request has one, the caller's own or a new one, and is told it.

`traceparent` (W3C Trace Context) makes the caller's trace id the correlation, `X-Correlation-Id` any other
word; what the mesh does because of the request carries it (`bus.correlation`).
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bus.correlation import correlated, is_correlation, parse_traceparent

HEADER = "X-Correlation-Id"


class RequestOrigin:
    """ASGI: `bus.correlation.current()` is the request's within it, and in its answer's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, span = asked(Headers(scope=scope))
        with correlated(given, span=span) as name:

            async def told(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)[HEADER] = name
                await send(message)

            await self._app(scope, receive, told)


def asked(headers: Headers) -> tuple[str | None, str]:
    """The caller's correlation and span, as far as it gave usable ones."""
    parsed = parse_traceparent(headers.get("traceparent", ""))
    if parsed is not None:
        return parsed
    own = headers.get(HEADER, "")
    return (own if is_correlation(own) else None), ""
