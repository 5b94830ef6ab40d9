"""Listens to the mesh for all viewers of this gateway at once, while there are any.

One set of subscriptions, one picture, one delta at most four times a second, whoever watches. Nothing of the
mesh waits for it: plain subscriptions without a queue group; what comes faster than it is taken is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.messaging.key_value import Change, Watch
from bus.subject import Subject
from bus.tap.sampled_subscription import SampledSubscription
from entities.gateway.dashboard.view_model import MeshViewModel
from entities.gateway.dashboard.viewers import Viewer, sse
from schemas.base import Message
from schemas.data_plane import MicrobatchNotice, RouteTable
from schemas.door import MeshQuery, MeshStatus
from schemas.envelope import Envelope
from schemas.errors import DmscError, Unavailable
from schemas.fault import FaultRecord
from schemas.job import JobEvent
from schemas.module_status import ModuleList, ModuleQuery
from schemas.policy import PolicyDecision, PolicySuggestion, PolicySwitch
from schemas.registry import ServiceRecord
from schemas.telemetry import InstanceSample, NodeSample

log = get_logger("dashboard")


@dataclass(frozen=True, kw_only=True)
class AggregatorConfig:
    """How closely the mesh is looked at while somebody watches."""

    every_s: float = 0.25  # between two deltas, at least
    look_s: float = 2.0  # between two questions to the orchestrator
    past_s: float = 6 * 3600.0  # how far back curves and the time line begin
    lingers_s: float = 20.0  # it goes on for so long after the last viewer: a reload finds it running
    notices_per_s: int = 400  # hops that are looked at; the others are counted
    pending: int = 8192  # messages of one row that may wait; more are dropped
    viewers: int = 1000  # at a time; one more is told to come back
    patience_s: float = 3.0  # for the orchestrator's first answer


Records = Callable[[], Mapping[str, ServiceRecord]]


class DashboardAggregator:
    """`async with feed.viewer() as viewer: await viewer.next(…)`; `close()` ends it for good."""

    def __init__(self, bus: Bus, records: Records, config: AggregatorConfig | None = None) -> None:
        self.config = config or AggregatorConfig()
        self.picture = MeshViewModel()
        self._bus = bus
        self._records = records
        self._viewers: set[Viewer] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Subscription] = []
        self._watch: Watch | None = None
        self._glimpse: SampledSubscription | None = None
        self._starting = asyncio.Lock()
        self._rest: asyncio.TimerHandle | None = None
        self.closed = False

    @contextlib.asynccontextmanager
    async def viewer(self) -> AsyncIterator[Viewer]:
        """Joins those who watch.

        Raises:
            Unavailable: too many watch, or this gateway is about to end.
        """
        if len(self._viewers) >= self.config.viewers:
            raise Unavailable(f"{self.config.viewers} watch here already; try another gateway")
        viewer = Viewer(self.whole_frame)
        self._viewers.add(viewer)  # before it starts: nobody may let it rest meanwhile
        try:
            await self._begin()
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and not self.closed:
                self._rest_later()

    async def whole(self) -> dict[str, Any]:
        """The picture at this moment, for somebody who only asks once."""
        async with self.viewer():
            return self._whole()

    def whole_frame(self) -> bytes:
        return sse("overview", self._whole(), self.picture.sequence)

    @property
    def watched(self) -> int:
        return len(self._viewers)

    @property
    def running(self) -> bool:
        return bool(self._tasks)

    async def close(self) -> None:
        """Ends the subscriptions. Twice is fine."""
        self.closed = True
        await self._stop()

    # --- begin and end ------------------------------------------------------------------------------------
    async def _begin(self) -> None:
        async with self._starting:
            if self.closed:
                raise Unavailable("this gateway is about to end; try another one")
            if self._rest is not None:
                self._rest.cancel()
                self._rest = None
            if self._tasks:
                return
            self.picture = MeshViewModel()
            try:
                await self._subscribe()
                await self._catch_up()
            except BaseException:
                await self._stop()
                raise
            self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._look())]

    def _rest_later(self) -> None:
        if self._rest is None:
            self._rest = asyncio.get_running_loop().call_later(self.config.lingers_s, self._rest_now)

    def _rest_now(self) -> None:
        self._rest = None
        if not self._viewers:
            self._tasks.append(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        async with self._starting:
            if not self._viewers:
                await self._stop()

    async def _stop(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        subscriptions, self._subscriptions = self._subscriptions, []
        watch, self._watch = self._watch, None
        glimpse, self._glimpse = self._glimpse, None
        ending: list[Coroutine[Any, Any, None]] = [each.stop(drain=False) for each in subscriptions]
        ending += [each.stop() for each in (watch, glimpse) if each is not None]
        await asyncio.gather(*ending, return_exceptions=True)

    # --- what is heard ------------------------------------------------------------------------------------
    async def _subscribe(self) -> None:
        picture = self.picture

        async def sample(message: InstanceSample, _: Envelope) -> None:
            picture.take_sample(message, time.time())

        async def node(message: NodeSample, _: Envelope) -> None:
            picture.take_node(message, time.time())

        async def told(message: Message, envelope: Envelope) -> None:
            self._take(message, envelope)

        async def table(change: Change) -> None:
            if change.key:
                job, cluster, stage = change.key.split(".")
                table = change.message if isinstance(change.message, RouteTable) else None
                picture.take_table((job, cluster, int(stage)), table)

        def moved(message: Message) -> None:
            if isinstance(message, MicrobatchNotice):
                picture.take_notice(message)

        rows: tuple[tuple[Subject, Any], ...] = (
            (subjects.INSTANCE_SAMPLE, sample),
            (subjects.NODE_SAMPLE, node),
            *((row, told) for row in _TOLD),
        )
        for row, handler in rows:
            self._subscriptions.append(
                await self._bus.subscribe(row, handler, pending_limit=self.config.pending)
            )
        self._glimpse = SampledSubscription(
            self._bus, subjects.NOTICE, moved, per_s=self.config.notices_per_s
        )
        await self._glimpse.start()
        self._watch = await self._bus.bucket(subjects.ROUTE_TABLE).watch(table)

    def _take(self, message: Message, envelope: Envelope) -> None:
        match message:
            case JobEvent():
                self.picture.take_event(message, envelope.id)
            case FaultRecord():
                self.picture.take_fault(message)
            case PolicySuggestion():
                self.picture.take_suggestion(message, envelope.id)
            case PolicyDecision():
                self.picture.take_decision(message, envelope.id, envelope.sent_at)
            case PolicySwitch():
                self.picture.take_switch(message, envelope.id, envelope.sent_at)

    async def _catch_up(self) -> None:
        """What happened before anybody watched, out of the streams; then the mesh as it is."""
        since = time.time() - self.config.past_s
        for row in _TOLD:
            count = 0
            async with contextlib.aclosing(self._bus.history(row, since=since)) as past:
                async for item in past:
                    self._take(item.message, item.envelope)
                    count += 1
                    if count % 200 == 0:
                        await asyncio.sleep(0)  # a long past must not keep the others waiting
        await self._ask_mesh()
        await self._ask_modules()
        self.picture.take_records(self._records())
        self.picture.delta(time.time())  # the first viewer has all of it from the whole

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.config.look_s)
            await self._ask_mesh()
            await self._ask_modules()

    async def _ask_mesh(self) -> None:
        try:
            answer = await self._bus.command(
                subjects.MESH_QUERY, MeshQuery(), deadline_s=self.config.patience_s
            )
        except DmscError as error:
            self.picture.trouble("orchestrator", f"jobs and nodes as last known: {error.text}")
            return
        self.picture.trouble("orchestrator", "")
        if isinstance(answer, MeshStatus):
            self.picture.take_mesh(answer)

    async def _ask_modules(self) -> None:
        with contextlib.suppress(DmscError):  # what keeps it from answering was told just before
            answer = await self._bus.command(
                subjects.MODULE_QUERY, ModuleQuery(), deadline_s=self.config.patience_s
            )
            if isinstance(answer, ModuleList):
                self.picture.take_modules(answer)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.every_s)
            if not self._bus.connected:
                self.picture.trouble(
                    "bus", "the gateway has lost the bus and dials; figures are those of before"
                )
            else:
                self.picture.trouble("bus", "")
            self.picture.take_records(self._records())
            if self._glimpse is not None:
                self.picture.overlooked(self._glimpse.overlooked)
                self._glimpse.overlooked = 0
            try:
                delta = self.picture.delta(time.time())
            except Exception as error:  # one odd message must not blind everybody
                log.error("no delta", exc_info=error)
                continue
            if delta is not None and self._viewers:
                frame = sse("delta", delta, delta["sequence"])
                for viewer in self._viewers:
                    viewer.offer(frame)

    def _whole(self) -> dict[str, Any]:
        return self.picture.whole(time.time())


_TOLD = (
    subjects.JOB_EVENT,
    subjects.FAULT_RECORD,
    subjects.SUGGESTION,
    subjects.POLICY_DECISION,
    subjects.POLICY_SWITCH,
)
"""What is on streams, too: read there first, then heard."""
