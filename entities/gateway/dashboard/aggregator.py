"""Aggregates the mesh's messages into one view model for all viewers of this gateway, while there are any.

There is one set of subscriptions, one view model, and one delta at most four times a second, however many
watch. Nothing in the mesh waits for it: it uses plain subscriptions without a queue group, and drops messages
that come faster than it takes them in.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.messaging.key_value import Change, Watch
from bus.subject_row import Subject
from bus.tap.sampled_subscription import SampledSubscription
from bus.tasks import cancel
from entities.gateway.dashboard.job_curve import JobCurve
from entities.gateway.dashboard.view_model import PAGE, MeshViewModel, OverviewPart
from entities.gateway.dashboard.viewers import Viewer
from entities.gateway.server_sent_events import encode_event
from schemas.base import Message
from schemas.data_plane import MicrobatchNotice, RouteTable
from schemas.envelope import Envelope
from schemas.errors import DmscError, Unavailable
from schemas.fault import FaultRecord
from schemas.gateway_api import MeshQuery, MeshStatus
from schemas.job import JobEvent
from schemas.module_status import ModuleList, ModuleQuery
from schemas.policy import PolicyDecision, PolicySuggestion, PolicySwitch
from schemas.queue import QueueQuery, QueueStatus
from schemas.registry import ServiceRecord
from schemas.services.figures import ServiceFigures
from schemas.services.model_service import ModelService
from schemas.telemetry import InstanceSample, NodeSample

log = get_logger("dashboard")

STREAMED = (
    subjects.JOB_EVENT,
    subjects.FAULT_RECORD,
    subjects.SUGGESTION,
    subjects.POLICY_DECISION,
    subjects.POLICY_SWITCH,
)
"""Subjects that are also on streams: their past is read from there, then new messages are received."""


@dataclass(frozen=True, kw_only=True)
class AggregatorConfig:
    """Rates and limits of the aggregation."""

    every_s: float = 0.25  # between two deltas, at least
    poll_s: float = 2.0  # between two queries to the orchestrator
    queue_s: float = 5.0  # between two questions who waits: each has the queue decided about once more
    past_s: float = 6 * 3600.0  # how far back the time line begins, and at first the curves
    whole_curves: bool = True  # then read the curves of jobs that began before that, from their first step
    lingers_s: float = 20.0  # it runs on for so long after the last viewer, so that a reload finds it running
    notices_per_s: int = 400  # hops that are shown; the others are only counted; 0: none is listened to
    pending: int = 8192  # messages of one subject row that may wait; more are dropped
    viewers: int = 1000  # at a time; one more is refused
    patience_s: float = 3.0  # timeout for the orchestrator's answer, and for the first route tables
    keepalive_s: float = 15.0  # a comment is sent to a browser after this long without a frame
    check_s: float = 1.0  # how often a stream checks whether the aggregator was closed
    streams: tuple[Subject, ...] = STREAMED  # whose past is read, and then new messages


Records = Callable[[], Mapping[str, ServiceRecord]]
Mesh = Callable[[], MeshStatus]
Services = Callable[[], Iterable[ModelService]]


class DashboardAggregator:
    """The aggregation: `async with aggregator.viewer() as viewer: await viewer.next(…)`.

    It starts with the first viewer and stops some time after the last; `close()` ends it for good.

    Args:
        bus: the connection, whose owner may listen to the rows of samples, notices and `config.streams`.
        records: the registry's present records.
        config: rates and limits.
        mesh: the jobs and nodes, where the orchestrator can't be asked for them (nor for modules).
        services: the model services, as its owner knows them.
    """

    def __init__(
        self,
        bus: Bus,
        records: Records,
        config: AggregatorConfig | None = None,
        mesh: Mesh | None = None,
        services: Services = tuple,
    ) -> None:
        self.config = config or AggregatorConfig()
        self.view_model = MeshViewModel()
        self._bus = bus
        self._records = records
        self._mesh = mesh
        self._services = services
        self._viewers: set[Viewer] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Subscription] = []
        self._watch: Watch | None = None
        self._tables_current = asyncio.Event()
        self._notices: SampledSubscription | None = None
        self._starting = asyncio.Lock()
        self._stop_timer: asyncio.TimerHandle | None = None
        self._asks_queue_at = 0.0
        self.closed = False

    @contextlib.asynccontextmanager
    async def viewer(self) -> AsyncIterator[Viewer]:
        """A new viewer, for the length of the block.

        Raises:
            Unavailable: there are too many viewers, or this gateway is about to end.
        """
        if len(self._viewers) >= self.config.viewers:
            raise Unavailable(f"{self.config.viewers} watch here already; try another gateway")
        viewer = Viewer(self.whole_frame)
        self._viewers.add(viewer)  # before `_begin`, so that no timer stops the aggregation meanwhile
        try:
            await self._begin()
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and not self.closed:
                self._stop_later()

    async def whole(self, parts: Collection[OverviewPart] = PAGE) -> dict[str, Any]:
        """These parts of the view at this moment, for a single request."""
        async with self.viewer():
            if "services" in parts:
                self.view_model.services.known = tuple(self._services())
            return self.view_model.whole(time.time(), parts)

    def whole_frame(self) -> bytes:
        return encode_event("overview", self.view_model.whole(time.time()), self.view_model.sequence)

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
            if self._stop_timer is not None:
                self._stop_timer.cancel()
                self._stop_timer = None
            if self._tasks:
                return
            self.view_model = MeshViewModel()
            self._asks_queue_at = 0.0
            self._tables_current.clear()
            try:
                await self._subscribe()
                await self._catch_up()
            except BaseException:
                await self._stop()
                raise
            self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._poll())]
            if self.config.whole_curves:
                self._tasks.append(asyncio.create_task(self._complete_curves(self.view_model)))

    def _stop_later(self) -> None:
        if self._stop_timer is None:
            self._stop_timer = asyncio.get_running_loop().call_later(
                self.config.lingers_s, self._stop_if_unwatched
            )

    def _stop_if_unwatched(self) -> None:
        self._stop_timer = None
        if not self._viewers:
            self._tasks.append(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        async with self._starting:
            if not self._viewers:
                await self._stop()

    async def _stop(self) -> None:
        if self._stop_timer is not None:
            self._stop_timer.cancel()
            self._stop_timer = None
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        self._tasks = []
        await cancel(*tasks)
        subscriptions, self._subscriptions = self._subscriptions, []
        watch, self._watch = self._watch, None
        notices, self._notices = self._notices, None
        ending: list[Coroutine[Any, Any, None]] = [
            subscription.stop(drain=False) for subscription in subscriptions
        ]
        ending += [source.stop() for source in (watch, notices) if source is not None]
        await asyncio.gather(*ending, return_exceptions=True)

    # --- messages -----------------------------------------------------------------------------------------
    async def _subscribe(self) -> None:
        view_model = self.view_model

        async def sample(message: InstanceSample, _: Envelope) -> None:
            view_model.take_sample(message, time.time())

        async def node(message: NodeSample, _: Envelope) -> None:
            view_model.take_node(message, time.time())

        async def figures(message: ServiceFigures, _: Envelope) -> None:
            view_model.services.figures.take(message, time.time())

        async def streamed(message: Message, envelope: Envelope) -> None:
            self._take(message, envelope)

        async def table(change: Change) -> None:
            if change.key:
                job, cluster, stage = change.key.split(".")
                table = change.message if isinstance(change.message, RouteTable) else None
                view_model.take_table((job, cluster, int(stage)), table, time.time())
            else:
                self._tables_current.set()

        def notice(message: Message) -> None:
            if isinstance(message, MicrobatchNotice):
                view_model.take_notice(message)

        rows: tuple[tuple[Subject, Any], ...] = (
            (subjects.INSTANCE_SAMPLE, sample),
            (subjects.NODE_SAMPLE, node),
            (subjects.SERVICE_FIGURES, figures),
            *((row, streamed) for row in self.config.streams),
        )
        for row, handler in rows:
            self._subscriptions.append(
                await self._bus.subscribe(row, handler, pending_limit=self.config.pending)
            )
        if self.config.notices_per_s:
            self._notices = SampledSubscription(
                self._bus, subjects.NOTICE, notice, per_s=self.config.notices_per_s
            )
            await self._notices.start()
        self._watch = await self._bus.bucket(subjects.ROUTE_TABLE).watch(table)

    def _take(self, message: Message, envelope: Envelope) -> None:
        match message:
            case JobEvent():
                self.view_model.take_event(message, envelope.id)
            case FaultRecord():
                self.view_model.take_fault(message)
            case PolicySuggestion():
                self.view_model.take_suggestion(message, envelope.id)
            case PolicyDecision():
                self.view_model.take_decision(message, envelope.id, envelope.sent_at)
            case PolicySwitch():
                self.view_model.take_switch(message, envelope.id, envelope.sent_at)

    async def _catch_up(self) -> None:
        """Reads the past from the streams, then the present state of the mesh."""
        since = time.time() - self.config.past_s
        for row in self.config.streams:
            count = 0
            async with contextlib.aclosing(self._bus.history(row, since=since)) as past:
                async for item in past:
                    self._take(item.message, item.envelope)
                    count += 1
                    if count % 200 == 0:
                        await asyncio.sleep(0)  # a long past must not delay other tasks
        await self._refresh()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.patience_s):
                await self._tables_current.wait()
        self.view_model.take_records(self._records())
        self.view_model.delta(time.time())  # dropped: the first viewer gets the whole view, which contains it

    async def _complete_curves(self, view_model: MeshViewModel) -> None:
        """Reads the curves of older jobs from their first step, while viewers see the present already."""
        for job in view_model.unfinished_curves():
            curve, count = JobCurve(), 0
            try:
                async with contextlib.aclosing(self._bus.history(subjects.JOB_EVENT, job=job)) as past:
                    async for item in past:
                        if isinstance(item.message, JobEvent):
                            curve.take_event(item.message)
                        count += 1
                        if count % 50 == 0:
                            await asyncio.sleep(0)
            except DmscError as error:
                log.info("curve not complete", job=job, code=error.code, error=error.text)
                continue
            if view_model.complete_curve(job, curve):
                for viewer in self._viewers:
                    viewer.renew()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.config.poll_s)
            await self._refresh()

    async def _refresh(self) -> None:
        if self._mesh is not None:
            self.view_model.take_mesh(self._mesh())
        else:
            await self._ask_mesh()
            await self._ask_modules()
            if time.monotonic() >= self._asks_queue_at:
                self._asks_queue_at = time.monotonic() + self.config.queue_s
                await self._ask_queue()

    async def _ask_mesh(self) -> None:
        try:
            answer = await self._bus.command(
                subjects.MESH_QUERY, MeshQuery(), deadline_s=self.config.patience_s
            )
        except DmscError as error:
            self.view_model.trouble("orchestrator", f"jobs and nodes as last known: {error.text}")
            return
        self.view_model.trouble("orchestrator", "")
        if isinstance(answer, MeshStatus):
            self.view_model.take_mesh(answer)

    async def _ask_queue(self) -> None:
        with contextlib.suppress(DmscError):  # `_ask_mesh` has just reported the same trouble
            answer = await self._bus.command(
                subjects.QUEUE_QUERY, QueueQuery(), deadline_s=self.config.patience_s
            )
            if isinstance(answer, QueueStatus):
                self.view_model.take_queue(answer)

    async def _ask_modules(self) -> None:
        with contextlib.suppress(DmscError):  # `_ask_mesh` has just reported the same trouble
            answer = await self._bus.command(
                subjects.MODULE_QUERY, ModuleQuery(), deadline_s=self.config.patience_s
            )
            if isinstance(answer, ModuleList):
                self.view_model.take_modules(answer)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.every_s)
            if not self._bus.connected:
                self.view_model.trouble(
                    "bus", "the bus is lost and dialled again; figures are those of before"
                )
            else:
                self.view_model.trouble("bus", "")
            self.view_model.take_records(self._records())
            if self._notices is not None:
                self.view_model.overlooked(self._notices.overlooked)
                self._notices.overlooked = 0
            try:
                delta = self.view_model.delta(time.time())
            except Exception as error:  # one odd message must not stop the updates for all viewers
                log.error("no delta", exc_info=error)
                continue
            if delta is not None and self._viewers:
                frame = encode_event("delta", delta, delta["sequence"])
                for viewer in self._viewers:
                    viewer.offer(frame)
