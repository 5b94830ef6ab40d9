"""What the routes of a gateway's HTTP door work with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from bus.connection import Bus
from bus.files.artifacts import ReadableArtifacts
from entities.gateway.dashboard import Dashboard
from entities.gateway.http.admission.load import HttpLoad
from entities.gateway.http.admission.response_cache import ResponseCache
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.metrics import HttpMetrics
from entities.gateway.http.readiness import ReadinessProbe
from entities.gateway.http.request_facts import RequestFacts
from entities.gateway.http.requests import Act, Keyed, read_body, sent
from entities.gateway.http.sse.hub import EventHub
from entities.gateway.http.sse.response import EventStream
from entities.gateway.operations.access_client import AccessClient
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import IdempotencyStore, key_token, request_digest
from entities.gateway.operations.job_view import JobCache
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.modules import PolicyVersionOperations
from entities.job_files.node_files import agents_of, files_of
from entities.presence.registry_view import RegistryFollower
from schemas.registry import ServiceRecord


@dataclass(frozen=True, kw_only=True)
class HttpContext:
    """All state of the door is in here; the routes keep none."""

    bus: Bus
    desk: JobOperations
    promotions: PolicyVersionOperations
    backends: Backends
    follower: RegistryFollower
    hub: EventHub
    kept: IdempotencyStore
    load: HttpLoad
    reads: ResponseCache
    probe: ReadinessProbe
    metrics: HttpMetrics
    dashboard: Dashboard
    config: HttpConfig

    @property
    def guard(self) -> AccessClient:
        return self.desk.guard

    @property
    def view(self) -> JobCache:
        """The jobs, as this gateway follows them."""
        assert self.desk.view is not None  # there is an HTTP door
        return self.desk.view

    @property
    def records(self) -> Mapping[str, ServiceRecord]:
        """The registry's, as this gateway follows them."""
        return self.follower.view.records

    def files(self, url: str) -> ReadableArtifacts:
        """Of the bus, or as a node reads them: no gateway opens what a job names.

        Raises `BadInput`: jobs may not name that.
        """
        return files_of(url, self.bus, lambda: agents_of(self.records))

    async def body(self, keyed: Keyed) -> bytes:
        """A JSON body, up to the door's limit."""
        return await read_body(keyed.request, self.config.max_job_bytes)

    def stream(
        self, request: Request, token: str, action: str, resource: str, pieces: AsyncGenerator[bytes, None]
    ) -> EventStream:
        """An event stream for a bearer who was let in: whoever it was until now, it counts for the user. It
        ends once the bearer may no more do `action` on `resource`.

        Raises `RateLimited` or `Overloaded`.
        """
        facts: RequestFacts = request.scope["dmsc"]
        facts.identity = f"user {self.guard.user_of(token)}"
        return EventStream(facts, self.hub, partial(self.guard.lasting, token, action, resource), pieces)

    async def once(
        self,
        keyed: Keyed,
        token: str,
        action: str,
        resource: str,
        act: Act,
        body: bytes = b"",
        *,
        always: bool = False,
    ) -> Response:
        """What `act` answers; with an `Idempotency-Key`, what it answered the first time.

        `always`: see `IdempotencyStore.once`.

        `action` on `resource` is what `act` itself asks the AAM for: nobody gets a kept answer who may
        not, or not any more, do what it answers.
        """
        if keyed.key is None:
            return sent(await act())
        access = await self.guard.check(token, action, resource)
        request = keyed.request
        digest = request_digest(request.method, request.url.path, request.url.query, body)
        with self.guard.permitted(token, action, resource, access):
            return sent(await self.kept.once(access.user, keyed.key, digest, act, always=always))

    async def cause(self, keyed: Keyed, token: str, action: str, resource: str) -> str | None:
        """By which a command with this key is recognised, whichever gateway sends it; None: no key."""
        if keyed.key is None:
            return None
        user = (await self.guard.check(token, action, resource)).user
        return f"key.{key_token(user, keyed.key)}"
