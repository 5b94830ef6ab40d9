"""The first thing that a request meets at the HTTP door: its id, its limits, its line in the log.

Plain ASGI and outermost, so that a refusal costs a fraction of an answer: while the gateway stops, beyond an
identity's rate, and while more is open or later than the process can do, it is `503` or `429` with
`Retry-After` before anything was begun. So whatever was refused here may be repeated without harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bus.logs import get_logger
from entities.gateway.backends import request_cause
from entities.gateway.door_config import DoorConfig
from entities.gateway.guard import Guard
from entities.gateway.metrics_door import DoorMetrics
from entities.gateway.problems import MEDIA_TYPE, problem
from entities.gateway.rate_limit import Buckets, Grant
from entities.metrics import HTTP_OPEN, HTTP_REFUSED, Reading
from schemas.errors import Overloaded, RateLimited

log = get_logger("door")

PROBES = frozenset({"/healthz", "/readyz"})
"""Answered whatever happens: they say what happens."""
QUIET = PROBES | {"/metrics"}
"""Asked for all day long by machines: their lines are for debugging."""
LAG_TICK_S = 0.05
LAG_TICKS = 5
"""So many lags in a row: one long turn of something else is no overload, a queue that stays is."""
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_TRACE = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_BEARER = re.compile(r"^bearer +(\S+) *$", re.IGNORECASE)


@dataclass(slots=True)
class Facts:
    """What is known of a request before it is looked at; in its scope under `dmsc`."""

    request_id: str
    trace_id: str
    identity: str
    is_stream: bool = False


@dataclass(slots=True)
class Load:
    """What the door is busy with. `lags`: of the event loop, seconds, the last few."""

    open: int = 0
    draining: bool = False
    refused: Counter[str] = field(default_factory=Counter)
    lags: deque[float] = field(default_factory=lambda: deque(maxlen=LAG_TICKS))
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def standing_lag_s(self) -> float:
        """The least of the last lags; 0 until there are enough."""
        return min(self.lags) if len(self.lags) == LAG_TICKS else 0.0

    async def measure(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_TICK_S
            await asyncio.sleep(LAG_TICK_S)
            self.lags.append(loop.time() - due)

    def enter(self) -> None:
        self.open += 1
        self.idle.clear()

    def leave(self) -> None:
        self.open -= 1
        if not self.open:
            self.idle.set()

    def readings(self, gateway: str) -> Iterator[Reading]:
        """For whoever scrapes this process."""
        yield HTTP_OPEN(self.open, gateway=gateway)
        for reason, count in self.refused.items():
            yield HTTP_REFUSED(count, gateway=gateway, reason=reason)

    async def drained(self, timeout_s: float) -> None:
        """Until nothing is being answered, or `timeout_s` has passed."""
        if self.open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.idle.wait()


class Admission:
    """ASGI around the application. Headers and query are never logged: they may hold secrets."""

    def __init__(
        self, app: ASGIApp, *, guard: Guard, metrics: DoorMetrics, load: Load, config: DoorConfig
    ) -> None:
        self._app = app
        self._guard = guard
        self._metrics = metrics
        self._load = load
        self._config = config
        self._known = Buckets(config.rate)
        self._unknown = Buckets(config.unknown_rate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        facts, grant = self._look(scope, begun)
        scope["dmsc"] = facts
        extra = [(b"x-request-id", facts.request_id.encode())]
        if grant is not None:
            extra += grant.headers()
        status, sent = 0, 0

        async def told(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
                if facts.is_stream:
                    self._load.leave()
            else:
                sent += len(message.get("body", b""))
            await send(message)

        refusal = self._refusal(scope["path"], grant)
        if refusal is None:
            # A client may send the same id again, and a submission is recognised by its cause.
            request_cause.set(f"{facts.request_id}.{secrets.token_hex(4)}")
            self._load.enter()
        try:
            if refusal is None:
                await self._app(scope, receive, told)
            else:
                await _refuse(told, *refusal)
        finally:
            if refusal is None and not (facts.is_stream and status):
                self._load.leave()
            self._metrics.answered[status] += 1
            tell = log.debug if scope["path"] in QUIET else log.info
            tell(
                "http request",
                gateway=self._metrics.gateway,
                method=scope["method"],
                path=scope["path"],
                status=status,
                bytes=sent,
                ms=round(1e3 * (time.monotonic() - begun), 1),
                request=facts.request_id,
                **({"trace": facts.trace_id} if facts.trace_id else {}),
            )

    def _look(self, scope: Scope, now: float) -> tuple[Facts, Grant | None]:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.match(given) else f"http-{secrets.token_hex(8)}"
        trace = _TRACE.match(headers.get(b"traceparent", b"").decode("latin-1"))
        bearer = _BEARER.match(headers.get(b"authorization", b"").decode("latin-1"))
        user = self._guard.user_of(bearer.group(1)) if bearer is not None else None
        client = scope.get("client")
        identity = f"user {user}" if user is not None else f"address {client[0] if client else ''}"
        facts = Facts(request_id, trace.group(1) if trace else "", identity)
        if scope["path"] in PROBES:
            return facts, None
        return facts, (self._known if user is not None else self._unknown).take(identity, now)

    def _refusal(self, path: str, grant: Grant | None) -> tuple[HTTPStatus, str, str, int] | None:
        """Status, code, what to say, and when to come back."""
        load = self._load
        if grant is None:
            return None
        if load.draining:
            reason, said = "draining", "this gateway stops; ask another one"
        elif not grant.allowed:
            load.refused["rate"] += 1
            said = (
                f"more requests than {grant.limit} at once; Retry-After and RateLimit-Reset say when to go on"
            )
            return HTTPStatus.TOO_MANY_REQUESTS, RateLimited.code, said, 0
        elif load.open >= self._config.open_requests:
            reason, said = (
                "open",
                "more requests are open here than this gateway can do; come back in a second",
            )
        elif load.standing_lag_s > self._config.lag_s:
            reason, said = "lag", "this gateway is behind with its work; come back in a second"
        else:
            return None
        load.refused[reason] += 1
        return HTTPStatus.SERVICE_UNAVAILABLE, Overloaded.code, said, 1


async def _refuse(send: Send, status: HTTPStatus, code: str, detail: str, retry_after_s: int) -> None:
    body = json.dumps(problem(status, detail, code, retryable=True)).encode()
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", b"%d" % len(body)),
    ]
    if retry_after_s:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    start: dict[str, Any] = {"type": "http.response.start", "status": int(status), "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
