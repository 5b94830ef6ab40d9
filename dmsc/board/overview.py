"""The overview of a mesh, read again and again: from a gateway, or from the bus where no gateway answers.

On the bus the gateway's own view model is fed in this process, with what every role may listen to there: the
route tables, samples and steps, and the registry's and the orchestrator's records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dmsc.board.documents import Overview, silent
from dmsc.client.async_client import AsyncClient
from dmsc.state.settings import BusAddress, find_bus
from schemas.errors import BusUnreachable, Unavailable

if TYPE_CHECKING:
    from bus.connection import Bus
    from bus.messaging.key_value import Change
    from bus.subject_row import Subject
    from entities.gateway.dashboard.aggregator import DashboardAggregator
    from entities.gateway.dashboard.view_model import OverviewPart

NO_GATEWAY = "no gateway answers; reading the bus"


@dataclass(frozen=True, kw_only=True)
class ReaderTimes:
    """Patience of a reader, in seconds."""

    gateway_s: float = 3.0  # a gateway that is too busy is asked again for so long; then the bus is read
    samples_s: float = 2.5  # for the next sample of all: they come once a second
    links_s: float = 6.5  # the same for links, whose figures come every five seconds if they do not change
    again_s: float = 0.25  # between two readings meanwhile


@dataclass(frozen=True, kw_only=True)
class MeshAddresses:
    """Where the mesh is, as the options name it; None: as the environment and the state folder do."""

    gateway: str | None = None
    token: str | None = None
    bus: str | None = None
    bus_token: str | None = None
    state: Path | None = None


class OverviewReader:
    """Reads parts of the overview; use it with `async with`. Once it reads the bus, it goes on doing so."""

    def __init__(
        self,
        addresses: MeshAddresses,
        parts: tuple[OverviewPart, ...],
        times: ReaderTimes = ReaderTimes(),
    ) -> None:
        self._addresses = addresses
        self._times = times
        self._parts = parts
        self._stack = AsyncExitStack()
        self._client: AsyncClient | None = None
        self._local: DashboardAggregator | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def settle(self) -> Overview:
        """The overview once all instances and nodes have reported, or after a while without."""
        overview = await self.read()  # the gateway, or this process, listens from now on
        times = self._times
        deadline = time.monotonic() + (times.links_s if "links" in self._parts else times.samples_s)
        while silent(overview) and time.monotonic() < deadline:
            await asyncio.sleep(times.again_s)
            overview = await self.read()
        return overview

    async def read(self) -> Overview:
        """The overview at this moment; its `trouble` says that it is not a gateway's.

        Raises:
            Refused: the gateway, or the bus, does not let us in.
            Unavailable: no gateway answers, and nothing says where the bus is, or it does not answer either.
        """
        if self._local is None:
            try:
                return await self._ask_gateway()
            except Unavailable as error:
                self._local = await self._stack.enter_async_context(_on_the_bus(self._bus_address(error)))
        overview = await self._local.whole(self._parts)
        overview["trouble"]["gateway"] = NO_GATEWAY
        return overview

    async def _ask_gateway(self) -> Overview:
        at = self._addresses
        if self._client is None:
            patience_s = self._times.gateway_s
            client = AsyncClient(at.gateway, token=at.token, state=at.state, patience_s=patience_s)
            self._client = await self._stack.enter_async_context(client)
        return await self._client.overview(self._parts)

    def _bus_address(self, error: Unavailable) -> BusAddress:
        at = self._addresses
        try:
            return find_bus(at.bus, at.bus_token, at.state)
        except BusUnreachable:
            raise error from None


@asynccontextmanager
async def _on_the_bus(address: BusAddress) -> AsyncIterator[DashboardAggregator]:
    from bus import subjects
    from bus.connection import Bus
    from entities.gateway.dashboard.aggregator import AggregatorConfig, DashboardAggregator
    from schemas.envelope import EntityKind
    from schemas.gateway_api import JobSummary, MeshStatus

    config = AggregatorConfig(notices_per_s=0, whole_curves=False, streams=(subjects.JOB_EVENT,))
    async with (
        Bus.connect(address.servers, name="board", kind=EntityKind.TAP, token=address.token) as bus,
        _values(bus, subjects.REGISTRY_RECORD) as records,
        _values(bus, subjects.JOB_RECORD) as jobs,
    ):

        def mesh() -> MeshStatus:
            summaries = (
                JobSummary(
                    job=record.job,
                    name=record.spec.name,
                    state=record.state,
                    step=record.step,
                    steps=record.spec.training.steps,
                    reason=record.reason,
                )
                for record in jobs.values()
            )
            return MeshStatus(services=(), nodes=(), jobs=tuple(summaries))

        aggregator = DashboardAggregator(bus, lambda: records, config, mesh)
        try:
            yield aggregator
        finally:
            await aggregator.close()


@asynccontextmanager
async def _values(bus: Bus, row: Subject) -> AsyncIterator[dict[str, Any]]:
    """The present values of a bucket by their keys, kept up to date; all are there at the beginning."""
    values: dict[str, Any] = {}
    current = asyncio.Event()

    async def take(change: Change) -> None:
        if not change.key:
            current.set()
        elif change.message is None:
            values.pop(change.key, None)
        else:
            values[change.key] = change.message

    watch = await bus.bucket(row).watch(take)
    try:
        await current.wait()
        yield values
    finally:
        await watch.stop()
