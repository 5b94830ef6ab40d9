"""A functional module: one policy as a service on the bus (draft §4.2, Figure 2).

Ingestion, rebuild after a start, decisions on a thread of their own, suggestions out, lifecycle. What a
policy does wrong is counted and logged here and reaches nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

from bus import subjects
from bus.connection import Bus
from bus.discovery import resolve
from bus.logs import get_logger
from bus.presence import Presence
from bus.services import Subscription
from bus.subjects import Subject
from policies.engine import Engine, EngineConfig, Event, Output
from policies.kit import Policy
from policies.lifecycle import Lifecycle
from policies.orders import Orders
from policies.policy_thread import PolicyThread
from policies.recent import recent
from policies.store_reads import StoreReader
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BadInput, DmscError
from schemas.policy import ModuleLifecycle, ModuleState, PolicySuggestion
from schemas.registry import Endpoint, InstanceState, Resolve, ServiceRecord
from schemas.signals import RouteAdvertisement
from schemas.store import StoreRows

log = get_logger("module")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleConfig:
    """Settings of one functional module."""

    shadow: bool = False
    """Suggest, but have nothing adopted: for trying a version beside the active one."""

    history_s: float = 300.0
    """Seconds of the streams from which state is rebuilt. Longer remembers more and starts later."""

    queue: int = 100_000
    """Messages waiting for the policy; beyond it the oldest are dropped and counted."""

    patience_s: float = 10.0
    """Seconds that one round of the policy's code may take until the module is suspended."""

    lifecycle_every_s: float = 5.0
    """Seconds between two repetitions of the module's state, for an orchestrator that was restarted."""

    answer_s: float = 2.0
    """Seconds to wait for the orchestrator's acknowledgement of a state before going on without."""

    drain_s: float = 1.0
    """Seconds that leaving may take, with or without the orchestrator's acknowledgement."""

    cluster: str = "mesh"
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.queue < 1 or self.patience_s <= 0 or self.lifecycle_every_s <= self.answer_s:
            raise BadInput(
                "module settings: queue must be at least 1, patience_s above 0, "
                "lifecycle_every_s above answer_s"
            )


def module_sid(policy: Policy, *, shadow: bool = False) -> str:
    """The name for the bus connection. A shadow has one of its own, to run beside the active one."""
    version = re.sub(r"[^A-Za-z0-9_-]", "-", policy.version)
    return f"{policy.name}-shadow-{version}" if shadow else policy.name


class FunctionalModule:
    """Runs one policy until cancelled. `counters` and `dropped` only grow."""

    def __init__(self, bus: Bus, policy: Policy, config: ModuleConfig | None = None) -> None:
        self.config = config or ModuleConfig()
        self.engine = Engine(policy, self.config.engine)
        self.dropped = 0
        self._bus = bus
        self._policy = policy
        self._lifecycle = Lifecycle(
            bus,
            ModuleLifecycle(
                module=policy.name,
                version=policy.version,
                state=ModuleState.REGISTERED,
                subscribes=tuple(row.wildcard() for row in self.engine.rows()),
                jobs=self.config.engine.jobs,
                sid=bus.sender.name,
            ),
            every_s=self.config.lifecycle_every_s,
            answer_s=self.config.answer_s,
        )
        self._orders = Orders(bus, self.engine, self._lifecycle)
        self._stores = StoreReader(bus, self._store_answered)
        self._inbox: deque[Event] = deque()
        self._news = asyncio.Event()
        self._rebuilt: set[str] = set()
        self._rebuilt_until = 0.0
        self._turn = asyncio.Lock()
        self._thread: PolicyThread | None = None

    @property
    def state(self) -> ModuleState:
        return self._lifecycle.state

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Register, rebuild, serve until cancelled or ordered to drain; then drain and retire."""
        thread = self._thread = PolicyThread(self._policy.name)
        subscriptions: list[Subscription] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                announcer = tasks.create_task(self._lifecycle.run())
                async with self._present() as presence:
                    try:
                        for row in self.engine.rows():
                            subscriptions.append(await self._bus.subscribe(row, self._received(row)))
                        subscriptions.append(await self._orders.serve())
                        await self._rebuild(thread)
                        self._lifecycle.move(ModuleState.SHADOW if self.config.shadow else ModuleState.ACTIVE)
                        await self._lifecycle.told()
                        log.info("module ready", module=self._policy.name, version=self._policy.version,
                                 state=self.state.value)  # fmt: skip
                        if ready is not None:
                            ready.set()
                        await self._until_drained(tasks.create_task(self._work(thread)))
                    finally:
                        await self._stores.close()
                        await self._drain(subscriptions, presence)
                        announcer.cancel()
        finally:
            self._thread = None
            thread.close()

    async def answer(self, job: str) -> list[PolicySuggestion]:
        """The synchronous output of Figure 2: what the policy suggests for this job at this moment.

        Nothing is published. Empty if the job is unknown, or the policy suspended or not running.
        """
        view = self.engine.observations.jobs.get(job)
        if view is None or self._thread is None or self.state is ModuleState.SUSPENDED:
            return []
        output = Output()
        async with self._turn:
            output.suggestions = await self._thread.run(
                lambda: self.engine.ask(view, time.time(), into=output.problems)
            )
        self._log(output)
        return output.suggestions

    # --- in -------------------------------------------------------------------------------------------
    def _received(self, row: Subject) -> Callable[[Message, Envelope], Awaitable[None]]:
        async def take(message: Message, envelope: Envelope) -> None:
            self._take_in(row, message, envelope.id)

        return take

    def _take_in(self, row: Subject, message: Message, id: str) -> None:
        if len(self._inbox) >= self.config.queue:
            self._inbox.popleft()
            self.dropped += 1
            if self.dropped == 1:
                log.warning("the policy is slower than the telemetry, the oldest is dropped",
                            module=self._policy.name, queue=self.config.queue)  # fmt: skip
        self._inbox.append(Event(row=row, message=message, id=id, at=time.time()))
        self._news.set()

    def _store_answered(self, rows: StoreRows) -> None:
        """An event like any other, though of no stream: after a restart it is asked for again."""
        self._take_in(subjects.STORE_QUERY, rows, f"store {self._bus.next_id()}")

    async def _rebuild(self, thread: PolicyThread) -> None:
        """State from the streams' last minutes and the registry's snapshot; without them it starts empty."""
        since = time.time() - self.config.history_s
        events: list[Event] = []
        try:
            for row in self.engine.rows():
                if row.stream is not None:
                    events += [
                        _event(row, item.message, item.envelope)
                        for item in await recent(self._bus, row, since)
                    ]
            said = subjects.SUGGESTION
            for item in await recent(self._bus, said, since, module=self._policy.name):
                if (
                    isinstance(item.message, PolicySuggestion)
                    and item.message.version == self._policy.version
                ):
                    events.append(_event(said, item.message, item.envelope))
        except DmscError as error:
            log.warning("history not read, starting without", module=self._policy.name, reason=error.text)
        events.sort(key=lambda event: event.at)
        with contextlib.suppress(DmscError):  # the next full advertisement brings the same
            found = await resolve(self._bus, Resolve(), timeout_s=self.config.answer_s)
            snapshot = RouteAdvertisement(
                revision=found.revision, previous=found.revision, full=True, changed=found.records
            )
            events.append(Event(row=subjects.ADVERTISEMENT, message=snapshot, id="snapshot", at=time.time()))
        self._rebuilt, self._rebuilt_until = {event.id for event in events}, time.monotonic() + 5.0
        problems = await thread.run(lambda: self.engine.take(events))
        self._log(Output(problems=problems))
        log.info(
            "state rebuilt",
            module=self._policy.name,
            events=len(events),
            jobs=len(self.engine.observations.jobs),
        )

    # --- decide and say -------------------------------------------------------------------------------
    async def _work(self, thread: PolicyThread) -> None:
        while True:
            if self.engine.suspended and self.state is not ModuleState.SUSPENDED:
                self._suspend(self.engine.suspended)
            await self._something_to_do()
            self._news.clear()
            events = self._drained()
            now = time.time()
            async with self._turn:
                try:
                    async with asyncio.timeout(self.config.patience_s):
                        output = await thread.run(lambda: self._round(events, now))  # noqa: B023 (awaited here)
                except TimeoutError:
                    self._orders.lost = f"its code has not returned for {self.config.patience_s:g} s"
                    self._suspend(f"suspended: {self._orders.lost}")
                    await asyncio.get_running_loop().create_future()  # the thread is lost; only the end helps
                self._log(output)
                for suggestion in output.suggestions:
                    await self._say(suggestion)
                self._stores.start(output.reads)

    async def _until_drained(self, working: asyncio.Task[None]) -> None:
        drained = asyncio.create_task(self._orders.drained.wait())
        try:
            await asyncio.wait({working, drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            drained.cancel()

    def _round(self, events: list[Event], now: float) -> Output:
        problems = self.engine.take(events)
        output = self.engine.decide(now)
        return replace(output, problems=problems + output.problems)

    async def _say(self, suggestion: PolicySuggestion) -> None:
        try:
            id = await self._bus.publish(subjects.SUGGESTION, suggestion, module=self._policy.name)
        except DmscError as error:
            log.warning("suggestion not sent", module=self._policy.name, reason=error.text)
            return
        self.engine.published(suggestion, id, time.time())

    async def _something_to_do(self) -> None:
        due = self.engine.due(time.time())
        if self._inbox or due == 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(due):
                await self._news.wait()

    def _drained(self) -> list[Event]:
        events = list(self._inbox)
        self._inbox.clear()
        if self._rebuilt and time.monotonic() > self._rebuilt_until:
            self._rebuilt = set()
        return [event for event in events if event.id not in self._rebuilt] if self._rebuilt else events

    def _log(self, output: Output) -> None:
        for problem in output.problems:
            log.error("policy failed", module=self._policy.name, where=problem.where, reason=problem.text)

    # --- lifecycle ------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _present(self) -> AsyncIterator[Presence]:
        record = ServiceRecord(
            sid=self._bus.sender.name,
            prefix=f"module/{self._policy.name}",
            kind=EntityKind.FUNCTIONAL_MODULE,
            incarnation=self._bus.sender.incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster=self.config.cluster, node=_host()),
            version=self._policy.version,
            tags=("shadow",) if self.config.shadow else (),
        )
        async with Presence(self._bus, record) as presence:
            yield presence

    async def _drain(self, subscriptions: list[Subscription], presence: Presence) -> None:
        with contextlib.suppress(TimeoutError, DmscError):
            async with asyncio.timeout(self.config.drain_s):
                if self.state is not ModuleState.DRAINING:
                    self._lifecycle.move(ModuleState.DRAINING)
                # the answer to the order that made it leave still goes out
                await asyncio.gather(
                    *(one.stop(drain=one.row is subjects.MODULE_ORDER) for one in subscriptions)
                )
                self._lifecycle.move(ModuleState.RETIRED)
                await self._lifecycle.told()
        counters = self.engine.counters
        log.info(
            "module retired", module=self._policy.name, events=counters.events, decisions=counters.decisions,
            suggestions=counters.suggestions, errors=counters.errors, dropped=self.dropped,
        )  # fmt: skip

    def _suspend(self, reason: str) -> None:
        log.error("module suspended", module=self._policy.name, reason=reason)
        self._lifecycle.move(ModuleState.SUSPENDED, reason)


def _event(row: Subject, message: Message, envelope: Envelope) -> Event:
    return Event(row=row, message=message, id=envelope.id, at=envelope.sent_at)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:120] or "localhost"
