"""A functional module: one policy as a service on the bus (draft §4.2, Figure 2).

It takes in events, rebuilds its state after a start, runs decisions on a thread of their own, publishes
suggestions and keeps its lifecycle. Errors of the policy are counted and logged here and affect nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.messaging.handlers import Subscription
from bus.wire.correlation import correlate
from policies.kit.engine import Engine, EngineConfig, Event, Output, PolicyProblem, Result
from policies.kit.inference import Inferred
from policies.kit.policy import Policy
from policies.kit.store_reads import StoreReader
from policies.module.fault_answers import FaultAnswers
from policies.module.inference_host import InferenceConfig, InferenceProcess
from policies.module.ingestion import Ingestion
from policies.module.lifecycle import Lifecycle
from policies.module.orders import Orders
from policies.module.policy_thread import PolicyThread
from policies.module.questions import ModuleQuestions
from policies.module.state_keeper import StateKeeper, StateTimes
from policies.scoring.scoreboard import NEEDS, Scoreboard
from schemas import names
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError, Unavailable
from schemas.fault_choices import FaultAnswer, FaultQuestion
from schemas.learnt_state import LearntState
from schemas.module_status import ModuleAnswer, ModuleQuestion, version_token
from schemas.policy import ModuleDrift, ModuleLifecycle, ModuleState, PolicyScore, PolicySuggestion
from schemas.registry import Endpoint, InstanceState, ServiceRecord, owner_tag
from schemas.store import StoreRows

log = get_logger("module")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleConfig:
    """Settings of one functional module."""

    shadow: bool = False
    """Whether it only suggests and nothing is adopted: for a trial of a version next to the active one."""

    owner: str = ""
    """The user who runs it and may order it about (rule own-policies); empty: the mesh itself."""

    own_jobs: bool = False
    """Whether it suggests only for its owner's jobs and reads their local stores (researchers' modules)."""

    history_s: float = 300.0
    """Seconds of the streams from which state is rebuilt. Longer remembers more and starts later."""

    queue: int = 100_000
    """Most messages waiting for the policy; beyond it the oldest are dropped and counted."""

    round_s: float = 0.02
    """Least seconds from one round of the policy's code to the next. Passing a round to its thread costs as
    much as a dozen samples: a longer time makes fewer and larger rounds, but later suggestions."""

    gather_s: float = 0.25
    """Seconds that events wait for others while nothing can be decided yet (`every_s`), which saves three
    quarters of the rounds. An event that may lead to a decision at once does not wait."""

    patience_s: float = 10.0
    """Seconds that one round of the policy's code may take; then the module is suspended."""

    lifecycle_every_s: float = 5.0
    """Seconds between two repetitions of the module's state, for an orchestrator that was restarted."""

    answer_s: float = 2.0
    """Seconds to wait for the orchestrator's acknowledgement of a state before going on without."""

    drain_s: float = 1.0
    """Seconds that the module's end may take, with or without the orchestrator's acknowledgement; a third
    more before it for what it has learnt."""

    cluster: str = "mesh"
    engine: EngineConfig = field(default_factory=EngineConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    learnt: StateTimes = field(default_factory=StateTimes)

    def __post_init__(self) -> None:
        if self.queue < 1 or self.patience_s <= 0 or self.lifecycle_every_s <= self.answer_s:
            raise BadInput(
                "module settings: queue must be at least 1, patience_s above 0, "
                "lifecycle_every_s above answer_s"
            )


def module_sid(policy: Policy, *, shadow: bool = False) -> str:
    """The name of the bus connection. A shadow has its own name, to run next to the active one."""
    return f"{policy.name}-shadow-{version_token(policy.version)}" if shadow else policy.name


class FunctionalModule:
    """Runs one policy until cancelled."""

    def __init__(self, bus: Bus, policy: Policy, config: ModuleConfig | None = None) -> None:
        self.config = config or ModuleConfig()
        self.engine = Engine(policy, self.config.engine)
        self._bus = bus
        self._policy = policy
        self._owner = self.config.owner if self.config.own_jobs and self.config.owner else names.MESH
        self._lifecycle = Lifecycle(
            bus,
            ModuleLifecycle(
                module=policy.name,
                version=policy.version,
                state=ModuleState.REGISTERED,
                subscribes=tuple(row.wildcard() for row in self.engine.rows()),
                jobs=self.config.engine.jobs,
                sid=bus.sender.name,
                incarnation=bus.sender.incarnation,
                owner=self._owner,
                answers_faults=policy.answers_faults,
            ),
            every_s=self.config.lifecycle_every_s,
            answer_s=self.config.answer_s,
        )
        self._orders = Orders(bus, self.engine, self._lifecycle, self._state_entered)
        self._questions = ModuleQuestions(bus, policy, self.answer)
        self._faults = FaultAnswers(
            bus,
            policy,
            self._owner,
            self._about_fault,
            lambda answer, id: self._answers.append((answer, id, time.time())),
        )
        self._answers: deque[tuple[FaultAnswer, str, float]] = deque()
        self._model = InferenceProcess(
            type(policy), self.config.inference, self._take_inference, self._inference_failed
        )
        self._learnt_at = time.time()
        self._scoreboard = Scoreboard(policy.name, policy.version, self.engine.observations)
        self._scores: list[PolicyScore] = []
        self._stores = StoreReader(
            bus, self._take_store_rows, owner=self.config.owner if self.config.own_jobs else ""
        )
        rows = tuple(dict.fromkeys((*self.engine.rows(), *NEEDS)))
        self._inbox = Ingestion(
            bus, policy, rows, self.config.queue, self.config.gather_s, self.engine.is_urgent, self._owner
        )
        self._keeper = StateKeeper(
            bus,
            policy,
            self._owner,
            self.config.learnt,
            answer_s=self.config.answer_s,
            hurry=self._inbox.hurry,
        )
        self._policy_lock = asyncio.Lock()
        self._thread: PolicyThread | None = None
        self._presence: RegistrationClient | None = None

    @property
    def state(self) -> ModuleState:
        return self._lifecycle.state

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Registers, rebuilds, serves until cancelled or ordered to drain; then drains and retires."""
        thread = self._thread = PolicyThread(self._policy.name)
        subscriptions: list[Subscription] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(self._lifecycle.run())]
                if self._policy.has_model:
                    helpers.append(tasks.create_task(self._model.run()))
                async with self._registration() as self._presence:
                    try:
                        subscriptions += await self._inbox.subscribe()
                        subscriptions.append(await self._orders.serve())
                        if self._keeper.enabled:
                            subscriptions.append(await self._keeper.subscribe())
                        await self._rebuild(thread)
                        subscriptions += await self._faults.subscribe()
                        self._lifecycle.move(ModuleState.SHADOW if self.config.shadow else ModuleState.ACTIVE)
                        await self._questions.serve(active=not self.config.shadow)
                        await self._lifecycle.acknowledged()
                        log.info(
                            "module ready",
                            module=self._policy.name,
                            version=self._policy.version,
                            state=self.state.value,
                        )
                        if ready is not None:
                            ready.set()
                        await self._until_drained(tasks.create_task(self._work(thread)))
                    finally:
                        await self._stores.close()
                        await self._drain(subscriptions, thread)
                        for helper in helpers:
                            helper.cancel()
        finally:
            self._thread = None
            thread.close()

    async def answer(self, question: ModuleQuestion) -> ModuleAnswer:
        """The synchronous output of Figure 2: the policy's suggestions for this job at this moment.

        Nothing is published. Without suggestions the answer gives the reason.

        Raises:
            Unavailable: The policy's code is busy for longer than `patience_s`, or not running.
        """
        started_at = time.monotonic()
        output = Output()
        try:
            async with asyncio.timeout(self.config.patience_s), self._policy_lock:
                if self._thread is None:
                    raise Unavailable(f"module {self._policy.name} is not running")
                events = self._inbox.drained()  # the events before the question
                output = await self._thread.run(lambda: self._answer_now(question, events))
                self._inbox.hurry()  # the events just taken in may require a decision
        except TimeoutError:
            text = f"module {self._policy.name} computes for more than {self.config.patience_s:g} s"
            raise Unavailable(text) from None
        self._log(output)
        return ModuleAnswer(
            module=self._policy.name,
            version=self._policy.version,
            state=self.state,
            job=question.job,
            suggestions=tuple(output.suggestions),
            reason="" if output.suggestions else self._reason_for_none(question.job, output),
            took_ms=round(1e3 * (time.monotonic() - started_at), 3),
        )

    async def _about_fault(self, question: FaultQuestion) -> FaultAnswer | None:
        """What the policy would do about a fault at hand, after the events before it."""
        problems: list[PolicyProblem] = []

        def ask(events: list[Event | Result]) -> FaultAnswer | None:
            self._take_up(events)
            problems.extend(self.engine.take(events))
            return self.engine.fault(question, question.at, into=problems)

        async with self._policy_lock:
            if self._thread is None:
                return None
            events = self._inbox.drained()
            answer = await self._thread.run(lambda: ask(events))
            self._inbox.hurry()  # the events just taken in may require a decision
        self._log(Output(problems=problems))
        return answer

    def _take_up(self, events: list[Event | Result]) -> None:
        """Tells the scoreboard, which only the policy's thread changes, of answers sent, and of events."""
        while self._answers:
            self._scoreboard.follow_answer(*self._answers.popleft())
        self._scoreboard.take(events)

    def _answer_now(self, question: ModuleQuestion, events: list[Event | Result]) -> Output:
        now = time.time()
        inputs: list[Event | Result] = [
            Event(row=subjects.OBSERVATION, message=observation, id=f"input {index}", at=now)
            for index, observation in enumerate(question.inputs)
        ]
        self._take_up(events)
        output = Output(problems=self.engine.take([*events, *inputs]))
        view = self.engine.observations.jobs.get(question.job)
        if view is not None:
            output.suggestions = self.engine.ask(view, now, into=output.problems)
        return output

    def _reason_for_none(self, job: str, output: Output) -> str:
        """Why there is no suggestion."""
        if self.engine.suspended:
            return self.engine.suspended
        if job in self.engine.jobs()[1]:
            return f"disabled for {job}"
        if job not in self.engine.observations.jobs:
            return f"nothing heard of {job} yet, or it has ended"
        return "; ".join(problem.text for problem in output.problems) or "as things are, it suggests nothing"

    # --- input ----------------------------------------------------------------------------------------
    def _take_store_rows(self, rows: StoreRows) -> None:
        """Takes an answer in as an event. It is on no stream: after a restart the policy reads again."""
        id = f"store {self._bus.next_id()}"
        self._inbox.put(Event(row=subjects.STORE_QUERY, message=rows, id=id, at=time.time()))

    def _take_inference(self, inferred: Inferred) -> None:
        self._inbox.put(Result(inferred=inferred, id=f"inference {self._bus.next_id()}", at=time.time()))

    def _inference_failed(self, reason: str) -> None:
        self.engine.suspended = reason
        self._inbox.hurry()  # the next round suspends the module

    async def _rebuild(self, thread: PolicyThread) -> None:
        """Rebuilds the state from what is kept and the streams' last minutes; without them it starts empty.

        What was learnt replaces what the events before it would give again.
        """
        events = await self._inbox.history(time.time() - self.config.history_s, self.config.answer_s)
        kept = await self._keeper.load() if self._keeper.enabled else None
        self._log(Output(problems=await thread.run(lambda: self._take_history(events, kept))))
        log.info(
            "state rebuilt",
            module=self._policy.name,
            events=len(events),
            jobs=len(self.engine.observations.jobs),
        )

    def _take_history(self, events: list[Event], kept: LearntState | None) -> list[PolicyProblem]:
        if kept is None or not self._restore(kept):
            return self.engine.take(events)
        problems = self.engine.take(event for event in events if event.at <= kept.through)
        self._restore(kept)  # those events are in it already
        self._keeper.restored(kept)
        return problems + self.engine.take(event for event in events if event.at > kept.through)

    def _restore(self, state: LearntState) -> bool:
        """Has the policy go on from a kept state; False if it does not fit."""
        try:
            problems = self.engine.restore(state.data, state.through)
        except ValueError as error:
            self._keeper.refuse(state, str(error))
            return False
        self._log(Output(problems=problems))
        return True

    # --- decisions ------------------------------------------------------------------------------------
    async def _work(self, thread: PolicyThread) -> None:
        started_at = -math.inf
        while True:
            if self.engine.suspended and self.state is not ModuleState.SUSPENDED:
                self._suspend(self.engine.suspended)
            await self._inbox.until_worth_a_round(lambda: self.engine.due(time.time()))
            await asyncio.sleep(self.config.round_s - (time.monotonic() - started_at))
            started_at = time.monotonic()
            events, replaced = self._inbox.drained(), self._keeper.take_pending()
            now = time.time()
            async with self._policy_lock:
                try:
                    async with asyncio.timeout(self.config.patience_s):
                        output = await thread.run(lambda: self._round(events, replaced, now))  # noqa: B023 (awaited here)
                except TimeoutError:
                    self._orders.hang = f"its code has not returned for {self.config.patience_s:g} s"
                    self._suspend(f"suspended: {self._orders.hang}")
                    await asyncio.get_running_loop().create_future()  # waits for the end: the thread is lost
                self._log(output)
            if output.learnt is not None:  # before the suggestions that name its digest
                await self._keeper.keep(output.learnt, output.through)
            async with self._policy_lock:
                for suggestion in output.suggestions:
                    await self._publish(suggestion)
                await self._publish_scores()
                await self._tell_drift(output.drift)
                self._stores.start(output.reads)
                self._model.start(output.inferences)

    async def _until_drained(self, working: asyncio.Task[None]) -> None:
        drained = asyncio.create_task(self._orders.drained.wait())
        try:
            await asyncio.wait({working, drained}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            drained.cancel()

    def _round(self, events: list[Event | Result], replaced: LearntState | None, now: float) -> Output:
        if replaced is not None and self._restore(replaced):
            self._keeper.restored(replaced)
        self._take_up(events)
        problems = self.engine.take(events)
        output = self.engine.decide(now)
        is_kept = 0.0 <= now - self._learnt_at < self.config.learnt.every_s
        if output.learnt is None and not is_kept:
            output.learnt = self.engine.learnt(into=output.problems)
            self._learnt_at = now  # also where it failed
        elif output.learnt is not None:
            self._learnt_at = now
        self._scores = self._scoreboard.settle(now, shadow=self.state is ModuleState.SHADOW)
        output.through = self.engine.folded_until
        output.drift = self.engine.drift(into=output.problems)
        return replace(output, problems=problems + output.problems)

    async def _publish(self, suggestion: PolicySuggestion) -> None:
        correlate(self._inbox.correlation(suggestion.job))
        try:
            id = await self._bus.publish(
                subjects.SUGGESTION,
                suggestion.model_copy(update={"owner": self._owner}),
                owner=self._owner,
                module=self._policy.name,
            )
        except DmscError as error:
            log.warning("suggestion not sent", module=self._policy.name, reason=error.text)
            return
        now = time.time()
        self.engine.published(suggestion, id, now)
        self._scoreboard.follow(suggestion, id, now)

    async def _tell_drift(self, reason: str) -> None:
        """Tells the mesh that what it learnt no longer fits what happens, or does again."""
        if bool(reason) == bool(self._lifecycle.now.drift):
            return
        log.warning("drift", module=self._policy.name, drifted=bool(reason), reason=reason)
        self._lifecycle.drifts(reason)
        drift = ModuleDrift(
            owner=self._owner,
            module=self._policy.name,
            version=self._policy.version,
            drifted=bool(reason),
            reason=reason,
        )
        with contextlib.suppress(DmscError):  # the lifecycle carries it as well
            await self._bus.publish(subjects.MODULE_DRIFT, drift, owner=self._owner, module=self._policy.name)

    async def _publish_scores(self) -> None:
        """Publishes the scores of earlier suggestions; a score that can't be sent is lost."""
        for score in self._scores:
            correlate(self._inbox.correlation(score.job))
            with contextlib.suppress(DmscError):
                await self._bus.publish(
                    subjects.POLICY_SCORE,
                    score.model_copy(update={"owner": self._owner}),
                    owner=self._owner,
                    module=self._policy.name,
                )

    def _log(self, output: Output) -> None:
        for problem in output.problems:
            log.error("policy failed", module=self._policy.name, where=problem.where, reason=problem.text)

    # --- lifecycle ------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def _registration(self) -> AsyncIterator[RegistrationClient]:
        record = ServiceRecord(
            sid=self._bus.sender.name,
            prefix=f"module/{self._policy.name}",
            kind=EntityKind.FUNCTIONAL_MODULE,
            incarnation=self._bus.sender.incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster=self.config.cluster, node=_host()),
            version=self._policy.version,
            tags=self._tags(shadow=self.config.shadow),
        )
        async with RegistrationClient(self._bus, record) as presence:
            yield presence

    async def _state_entered(self, state: ModuleState) -> None:
        """After an order made it active or a shadow: changes its subscriptions and its registration."""
        await self._questions.serve(active=state is ModuleState.ACTIVE)
        if self._presence is not None:
            with contextlib.suppress(DmscError):  # the next registration carries it
                await self._presence.update(tags=self._tags(shadow=state is ModuleState.SHADOW))

    def _tags(self, *, shadow: bool) -> tuple[str, ...]:
        owner = (owner_tag(self.config.owner),) if self.config.owner else ()
        return (("shadow",) if shadow else ()) + owner

    async def _drain(self, subscriptions: list[Subscription], thread: PolicyThread) -> None:
        if self._keeper.enabled and not self._orders.hang:
            with contextlib.suppress(TimeoutError, DmscError):
                async with asyncio.timeout(self.config.drain_s / 3):
                    learnt = await thread.run(lambda: self.engine.learnt(into=[]))
                    if learnt is not None:
                        await self._keeper.keep(learnt, self.engine.folded_until)
        with contextlib.suppress(TimeoutError, DmscError):
            async with asyncio.timeout(self.config.drain_s):
                if self.state is not ModuleState.DRAINING:
                    self._lifecycle.move(ModuleState.DRAINING)
                await self._questions.stop()
                # Orders are drained, so that the order to drain is still answered.
                await asyncio.gather(
                    *(item.stop(drain=item.row is subjects.MODULE_ORDER) for item in subscriptions)
                )
                self._lifecycle.move(ModuleState.RETIRED)
                await self._lifecycle.acknowledged()
        counters = self.engine.counters
        log.info(
            "module retired",
            module=self._policy.name,
            events=counters.events,
            decisions=counters.decisions,
            suggestions=counters.suggestions,
            errors=counters.errors,
            dropped=self._inbox.dropped,
        )

    def _suspend(self, reason: str) -> None:
        log.error("module suspended", module=self._policy.name, reason=reason)
        self._lifecycle.move(ModuleState.SUSPENDED, reason)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:120] or "localhost"
