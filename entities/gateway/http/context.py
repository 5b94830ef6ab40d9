"""The context that every route of the HTTP API gets: bus, operations, limits and metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial

from fastapi import Request, Response

from bus.connection import Bus
from bus.files.artifacts import ReadableArtifacts
from entities.gateway.dashboard import Dashboard
from entities.gateway.http.admission.load import HttpLoad
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.metrics import HttpMetrics
from entities.gateway.http.readiness import ReadinessProbe
from entities.gateway.http.request_facts import RequestFacts
from entities.gateway.http.requests import Act, Keyed, read_body, sent
from entities.gateway.http.sse.hub import EventHub
from entities.gateway.http.sse.response import EventStream
from entities.gateway.operations.access_client import AccessClient, Bearer
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import IdempotencyStore, key_token, request_digest
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.modules import PolicyVersionOperations
from entities.job_files.node_files import agents_of, files_of
from entities.presence.registry_view import RegistryFollower
from schemas.registry import ServiceRecord


@dataclass(frozen=True, kw_only=True)
class HttpContext:
    """All state of the HTTP API. The routes keep none."""

    bus: Bus
    desk: JobOperations
    promotions: PolicyVersionOperations
    backends: Backends
    follower: RegistryFollower
    hub: EventHub
    kept: IdempotencyStore
    load: HttpLoad
    probe: ReadinessProbe
    metrics: HttpMetrics
    dashboard: Dashboard
    config: HttpConfig

    @property
    def guard(self) -> AccessClient:
        return self.desk.guard

    @property
    def records(self) -> Mapping[str, ServiceRecord]:
        """The registry's records by SID, in this gateway's copy."""
        return self.follower.view.records

    def files(self, url: str) -> ReadableArtifacts:
        """The files below a URL, read from the bus or through a node agent.

        A gateway itself opens no path that a job names. Raises `BadInput` if jobs may not name the URL.
        """
        return files_of(url, self.bus, lambda: agents_of(self.records))

    async def body(self, keyed: Keyed) -> bytes:
        """The request's JSON body. Raises `TooLarge` above `max_job_bytes`."""
        return await read_body(keyed.request, self.config.max_job_bytes)

    def stream(
        self,
        request: Request,
        bearer: Bearer,
        action: str,
        resource: str,
        pieces: AsyncGenerator[bytes, None],
    ) -> EventStream:
        """An event stream for a bearer whose access was checked; it counts towards that user's limit.

        The stream ends once the bearer is no longer permitted to do `action` on `resource`.
        Raises `RateLimited` or `Overloaded`.
        """
        facts: RequestFacts = request.scope["dmsc"]
        facts.identity = f"user {self.guard.user_of(bearer.token)}"
        return EventStream(
            facts, self.hub, partial(self.guard.lasting, bearer.token, action, resource), pieces
        )

    async def once(
        self,
        keyed: Keyed,
        bearer: Bearer,
        action: str,
        resource: str,
        act: Act,
        body: bytes = b"",
        *,
        always: bool = False,
    ) -> Response:
        """Runs `act` and returns its answer; with an `Idempotency-Key`, its first answer.

        `action` on `resource` is what `act` itself has checked by the AAM. It is checked here too, so that a
        stored answer goes only to a bearer who may do the action now. `always`: see `IdempotencyStore.once`.
        """
        if keyed.key is None:
            return sent(await act())
        access = await bearer.check(action, resource)
        request = keyed.request
        digest = request_digest(request.method, request.url.path, request.url.query, body)
        return sent(await self.kept.once(access.user, keyed.key, digest, act, always=always))

    async def cause(self, keyed: Keyed, bearer: Bearer, action: str, resource: str) -> str | None:
        """An id of a command, derived from its key and equal at every gateway; None without a key."""
        if keyed.key is None:
            return None
        user = (await bearer.check(action, resource)).user
        return f"key.{key_token(user, keyed.key)}"
