"""The outermost ASGI layer of the HTTP API: each request's correlation, its limits, and its line in the log.

It is plain ASGI, so that a refusal costs a fraction of an answer. It answers `503` or `429` with
`Retry-After` while the gateway stops, above an identity's rate, and under overload (`HttpLoad`). Nothing was
begun then, so a refused request may be repeated without harm. Under overload the refusal comes before all
else, without an id, `RateLimit-*` and a line in the log: these would cost more than the refusal.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bus.logs import get_logger
from bus.wire.correlation import correlated
from entities.gateway.dashboard.assets import PATH as PAGE
from entities.gateway.http.admission.early_refusal import BUSY, PROBES
from entities.gateway.http.admission.load import HttpLoad
from entities.gateway.http.api_document import PATH as DOCS
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.metrics import HttpMetrics
from entities.gateway.http.problems import OPENAI, problem_response, status_of
from entities.gateway.http.rate_limit import Buckets, RateGrant
from entities.gateway.http.request_facts import HEADERS, RequestFacts, caller_correlation
from entities.gateway.operations.access_client import AccessClient
from schemas.errors import BadInput, DmscError, Overloaded, RateLimited, Refused

log = get_logger("door")

QUIET = PROBES | {"/metrics"}
"""Paths that machines poll all day: their log lines are on the debug level."""
COUNTED = frozenset({"/v1/predict", "/v1/embeddings"})
"""Paths of services that are asked hundreds of times a second: answers that succeed are on that level, too,
since they are counted (`dmsc_service_*`)."""
ONCE = frozenset(
    (
        *(b"authorization", b"content-length", b"content-type", b"host"),
        *(b"idempotency-key", b"last-event-id", b"range"),
    )
)
"""Headers with a meaning here: a request may have each of them once."""
NO_TOKEN = "no token; send the header Authorization: Bearer TOKEN"
PAGES = (PAGE, DOCS)
DATA = [
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"x-content-type-options", b"nosniff"),
]
"""Headers of every answer but our pages: a browser then runs nothing that a job or a data set contains."""
_BEARER = re.compile(rb"^bearer +(\S+) *$", re.IGNORECASE)


class RequestAdmission:
    """An ASGI layer around the application. It never logs headers or queries: they may hold secrets."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: AccessClient,
        metrics: HttpMetrics,
        load: HttpLoad,
        config: HttpConfig,
    ) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics
        self._load = load
        self._user_buckets = Buckets(config.rate)
        self._address_buckets = Buckets(config.unknown_rate)
        self._most_stalled = config.stalled_each
        self._charge_bytes = config.charge_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        now = asyncio.get_running_loop().time()
        if scope["path"] not in PROBES and (reason := self._load.too_much(now)):
            self._load.shed(reason, now)
            self._metrics.shed()
            busy = _BUSY_OPENAI if scope["path"].startswith(OPENAI) else _BUSY
            await busy(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        caller_id, span = caller_correlation(headers)
        with correlated(caller_id, span=span) as correlation:
            response = _ResponseHeaders(send, [(name, correlation.encode()) for name in HEADERS])
            if not scope["path"].startswith(PAGES):  # pages have a policy of their own
                response.extra += DATA
            begun = time.monotonic()
            try:
                await self._admit(scope, headers, receive, response)
            finally:
                self._note(scope, response, begun)

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, response: _ResponseHeaders
    ) -> None:
        is_probe = scope["path"] in PROBES
        bearer = _BEARER.match(headers.get(b"authorization", b""))
        token = bearer.group(1).decode("latin-1") if bearer is not None else ""
        user = self._access.user_of(token) if token else None
        client = scope.get("client")
        facts = RequestFacts(f"user {user}" if user is not None else f"address {client[0] if client else ''}")
        if not is_probe:
            # A page is some twenty files without secrets: loading it often is no attempt to guess tokens.
            is_page = scope["path"].startswith(PAGE)
            buckets = self._user_buckets if user is not None or is_page else self._address_buckets
            facts.charge = partial(_take, buckets, facts.identity)
            grant = buckets.take(facts.identity, time.monotonic())
            response.extra += grant.headers()
            refusal = self._limit_refusal(grant, scope["path"]) or _repeated_header(scope)
            if refusal is not None:
                await refusal(scope, receive, response)
                return
            await self._load.turn()
        body = _KeptBody(self._load, facts, self._charge_bytes)
        facts.keep = body.keep
        facts.downloads = lambda: self._load.downloads(facts.identity)
        scope["dmsc"] = response.facts = facts
        response.load = self._load
        facts.leave = response.leave
        self._load.enter()
        try:
            if has_body(headers) and not is_probe:
                if (
                    user is None
                    and (refusal := await self._unknown_user_refusal(token, scope["path"])) is not None
                ):
                    await refusal(scope, receive, response)
                    return
                if user is None and (known := self._access.user_of(token)) is not None:
                    facts.identity = f"user {known}"
                    facts.charge = partial(_take, self._user_buckets, facts.identity)
                receive = self._stalling(receive, user or self._access.user_of(token) or facts.identity)
            await self._app(scope, receive, response)
        finally:
            body.drop()
            response.leave()

    async def _unknown_user_refusal(self, token: str, path: str) -> JSONResponse | None:
        """Why the body of an unknown user is not read; None if it is to be read."""
        if not token:
            return _refusal(path, HTTPStatus.UNAUTHORIZED, NO_TOKEN, Refused.code)
        try:
            await self._access.check(token, "self.read", "self")
        except Refused as error:
            if not error.fields.get("user"):
                return _refusal(path, HTTPStatus.UNAUTHORIZED, error.text, error.code)
        except DmscError as error:
            return _refusal(path, status_of(error), error.text, error.code, 1.0)
        return None

    def _stalling(self, receive: Receive, identity: str) -> Receive:
        """Wraps `receive` to count the bodies of each identity that wait for the client's next bytes."""
        stalled = self._load.stalled
        is_whole = False

        async def counted_receive() -> Message:
            nonlocal is_whole
            if is_whole:
                return await receive()
            if stalled[identity] >= self._most_stalled:
                raise RateLimited(
                    f"{self._most_stalled} requests of yours have begun a body, and the rest does not come"
                )
            stalled[identity] += 1
            try:
                message = await receive()
            finally:
                stalled[identity] -= 1
                if not stalled[identity]:
                    del stalled[identity]
            is_whole = not message.get("more_body", False)
            return message

        return counted_receive

    def _note(self, scope: Scope, response: _ResponseHeaders, begun: float) -> None:
        self._metrics.answered[response.status] += 1
        path = scope["path"]
        is_quiet = path in QUIET or (path in COUNTED and response.status == HTTPStatus.OK)
        write = log.debug if is_quiet else log.info
        write(
            "http request",
            gateway=self._metrics.gateway,
            method=scope["method"],
            path=path,
            status=response.status,
            bytes=response.sent,
            ms=round(1e3 * (time.monotonic() - begun), 1),
        )

    def _limit_refusal(self, grant: RateGrant, path: str) -> JSONResponse | None:
        load = self._load
        if load.draining:
            load.refused["draining"] += 1
            text = "this gateway stops; ask another one"
            return _refusal(path, HTTPStatus.SERVICE_UNAVAILABLE, text, Overloaded.code, 1.0)
        if not grant.allowed:
            load.refused["rate"] += 1
            text = (
                f"more requests than {grant.limit} at once; Retry-After and RateLimit-Reset say when to go on"
            )
            return _refusal(path, HTTPStatus.TOO_MANY_REQUESTS, text, RateLimited.code)
        return None


class _KeptBody:
    """The bytes of one request's body that are in memory. Each `charge_bytes` of them count as a request."""

    __slots__ = ("_bytes", "_charge_bytes", "_facts", "_identity", "_load")

    def __init__(self, load: HttpLoad, facts: RequestFacts, charge_bytes: int) -> None:
        self._load, self._facts, self._charge_bytes = load, facts, charge_bytes
        self._identity = ""
        self._bytes = 0

    def keep(self, size: int) -> None:
        self._identity = self._identity or self._facts.identity
        self._load.keep(self._identity, size)
        charged = self._bytes // self._charge_bytes
        self._bytes += size
        for _ in range(charged, self._bytes // self._charge_bytes):
            if not self._facts.charge():
                text = f"more at once than you may send: {self._charge_bytes} bytes of a body are one request"
                raise RateLimited(text, retry_after_s=1.0)

    def drop(self) -> None:
        if self._bytes:
            self._load.drop(self._identity, self._bytes)
        self._bytes = 0


class _ResponseHeaders:
    """`send` with additional headers, which records the status and the bytes sent."""

    __slots__ = ("_send", "extra", "facts", "load", "sent", "status")

    def __init__(self, send: Send, extra: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self.extra = extra
        self.facts: RequestFacts | None = None
        self.load: HttpLoad | None = None  # set while this request counts as open
        self.status = 0
        self.sent = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.extra]
            if self.facts is not None and self.facts.is_stream:
                self.leave()
        else:
            self.sent += len(message.get("body", b""))
        await self._send(message)

    def leave(self) -> None:
        """Ends this request's count as open: it is answered, or became a stream. Twice is fine."""
        if self.load is not None:
            self.load.leave()
            self.load = None


def _take(buckets: Buckets, identity: str) -> bool:
    return buckets.take(identity, time.monotonic()).allowed


def has_body(headers: dict[bytes, bytes]) -> bool:
    """Whether a body follows the head. `headers`: lower-case names."""
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip() != b"0"


def _repeated_header(scope: Scope) -> JSONResponse | None:
    """Refuses a header given twice: a proxy, or another part of the gateway, might read the other value."""
    names = [name for name, _ in scope["headers"] if name in ONCE]
    for name in names:
        if names.count(name) > 1:
            text = f"the header {name.decode()} stands there {names.count(name)} times; send it once"
            return _refusal(scope["path"], HTTPStatus.BAD_REQUEST, text, BadInput.code)
    return None


def _refusal(path: str, status: HTTPStatus, text: str, code: str, retry_after_s: float = 0.0) -> JSONResponse:
    """A refusal. `retry_after_s` 0: without `Retry-After`, or `RateGrant.headers` has it."""
    retryable = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return problem_response(status, text, code, path=path, retry_after_s=retry_after_s, retryable=retryable)


_BUSY = _refusal("", HTTPStatus.SERVICE_UNAVAILABLE, BUSY, Overloaded.code, 1.0)
_BUSY_OPENAI = _refusal(OPENAI[0], HTTPStatus.SERVICE_UNAVAILABLE, BUSY, Overloaded.code, 1.0)
