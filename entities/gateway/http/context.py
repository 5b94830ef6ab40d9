"""The context that every route of the HTTP API gets: bus, operations, limits and metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import MappingProxyType

from fastapi import Request, Response

from bus.connection import Bus
from bus.files.artifacts import ReadableArtifacts
from entities.gateway.accounts.operations import AccountOperations
from entities.gateway.array_operations import ArrayOperations
from entities.gateway.backflow.operations import BackflowOperations
from entities.gateway.batches.operations import BatchOperations
from entities.gateway.calls.calls import WholeCalls
from entities.gateway.dashboard import Dashboard
from entities.gateway.data_sets.operations import DataSetOperations
from entities.gateway.generation.operations import GenerationOperations
from entities.gateway.http.admission.load import HttpLoad
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.metrics import HttpMetrics
from entities.gateway.http.readiness import ReadinessProbe
from entities.gateway.http.request_facts import RequestFacts
from entities.gateway.http.requests import Keyed, P, read_body, sent
from entities.gateway.http.sse.hub import EventHub
from entities.gateway.http.sse.response import EventStream
from entities.gateway.machine_operations import MachineOperations
from entities.gateway.models.operations import ModelOperations
from entities.gateway.operations.access_client import AccessClient, Bearer
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.feeds import FeedOperations
from entities.gateway.operations.idempotency import Answer, IdempotencyStore, request_digest
from entities.gateway.operations.job_curves import JobCurves
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.operation import Operation
from entities.gateway.services.operations import ServiceOperations
from entities.http_server.connection_limits import OpenConnections
from entities.job_files.node_files import agents_of, files_of
from entities.presence.registry_view import RegistryFollower
from schemas.registry import ServiceRecord


@dataclass(frozen=True, kw_only=True)
class HttpContext:
    """All state of the HTTP API. The routes keep none."""

    bus: Bus
    jobs: JobOperations
    arrays: ArrayOperations
    data_sets: DataSetOperations
    services: ServiceOperations
    accounts: AccountOperations
    models: ModelOperations
    machines: MachineOperations
    backends: Backends
    follower: RegistryFollower
    hub: EventHub
    idempotency: IdempotencyStore
    load: HttpLoad
    connections: OpenConnections
    probe: ReadinessProbe
    metrics: HttpMetrics
    dashboard: Dashboard
    curves: JobCurves
    feeds: FeedOperations
    generations: GenerationOperations
    backflow: BackflowOperations
    calls: WholeCalls
    batches: BatchOperations
    config: HttpConfig

    @property
    def access(self) -> AccessClient:
        return self.jobs.access

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

    @contextmanager
    def asking(self, request: Request, bearer: Bearer) -> Iterator[None]:
        """Counts a request, for the length of the block, as one that waits for a service.

        It may wait for long: for a version that starts, for room, for tokens. So it takes no place of the
        requests that this gateway answers by itself, and counts towards the user's limit of streams instead.
        Raises `RateLimited` or `Overloaded`.
        """
        facts: RequestFacts = request.scope["dmsc"]
        facts.identity = f"user {self.access.user_of(bearer.token)}"
        with self.hub.admitted(facts.identity), self.load.asks():
            facts.leave()
            yield

    def stream(
        self,
        request: Request,
        bearer: Bearer,
        action: str,
        resource: str,
        pieces: AsyncGenerator[bytes, None],
        *,
        own_headers: Mapping[str, str] = MappingProxyType({}),
        over: Callable[[], None] = lambda: None,
    ) -> EventStream:
        """An event stream for a bearer whose access was checked; it counts towards that user's limit.

        The stream ends once the bearer is no longer permitted to do `action` on `resource`.
        `own_headers`, `over`: see `EventStream`.
        Raises `RateLimited` or `Overloaded`.
        """
        facts: RequestFacts = request.scope["dmsc"]
        facts.identity = f"user {self.access.user_of(bearer.token)}"
        allowed = partial(self.access.lasting, bearer.token, action, resource)
        return EventStream(facts, self.hub, allowed, pieces, own_headers=own_headers, over=over)

    async def command(
        self,
        keyed: Keyed,
        bearer: Bearer,
        operation: Operation[P],
        body: bytes = b"",
        status: int = HTTPStatus.OK,
        location: Callable[[P], str] = lambda _: "",
    ) -> Response:
        """The answer of the operation; with an `Idempotency-Key`, the first one to a request with that key.

        Access is checked in either case, so a stored answer goes only to a bearer who may do it now.
        `location`: the URL of what the operation has created.
        """
        access = await bearer.check(operation.action, operation.resource)

        async def act() -> Answer:
            result = await operation.act(access)
            return Answer(result.model_dump_json(), int(status), location(result))

        if keyed.key is None:
            return sent(await act())
        request = keyed.request
        digest = request_digest(request.method, request.url.path, request.url.query, body)
        return sent(await self.idempotency.once(access.user, keyed.key, digest, act, always=operation.frees))
