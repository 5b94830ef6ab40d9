"""A functional module on a real bus with a real registry (draft §4.2): telemetry in, suggestions out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Subject
from dmsc.process.policy_loading import load_policy
from entities.orchestrator.policy.arbitration import ArbitrationState, arbitrate, register
from entities.orchestrator.policy.suggestion_rules import JobFacts
from entities.service_registry.service import ServiceRegistry
from policies.built_in.service_time_weights import ServiceTimeWeights
from policies.kit.engine import EngineConfig
from policies.kit.policy import Policy
from policies.kit.store_reads import StoreRead
from policies.kit.view import JobView
from policies.module.service import FunctionalModule, ModuleConfig, module_sid
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadInput
from schemas.module_status import ModuleQuestion
from schemas.policy import ModuleLifecycle, ModuleOrder, ModuleState, PolicyDecision, PolicySuggestion
from schemas.registry import Resolve
from schemas.step import Member
from schemas.store import StoreRows
from schemas.telemetry import InstanceSample
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually
from workers.local_store.local_store import LocalStore
from workers.local_store.recorder import StoreRecorder

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "my_policy.py"


class Arbiter:
    """The orchestrator's door for modules: real arbitration for one job of 2 × 2, without the rest of it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.lifecycles: list[ModuleLifecycle] = []
        self.suggestions: list[PolicySuggestion] = []
        self.decisions: list[PolicyDecision] = []
        self.news = asyncio.Condition()
        self._state = ArbitrationState()
        self._facts = JobFacts(
            active={0: ("j-s0-r0", "j-s0-r1"), 1: ("j-s1-r0", "j-s1-r1")}, weights={}, revision=1
        )

    async def start(self) -> None:
        await self.bus.serve(subjects.MODULE_LIFECYCLE, self._lifecycle)
        await self.bus.subscribe(subjects.SUGGESTION, self._suggestion)

    async def _lifecycle(self, message: ModuleLifecycle, envelope: Envelope) -> Ack:
        self._state = register(self._state, message, 0.0)
        async with self.news:
            self.lifecycles.append(message)
            self.news.notify_all()
        return Ack()

    async def _suggestion(self, message: PolicySuggestion, envelope: Envelope) -> None:
        now = asyncio.get_running_loop().time()
        outcome, self._state = arbitrate(self._state, message, self._facts, now)
        if outcome.adopted:
            self._facts = JobFacts(
                active=self._facts.active,
                weights={**self._facts.weights, outcome.stage: outcome.weights},
                revision=self._facts.revision + 1,
            )
        decision = PolicyDecision(
            module=message.module,
            version=message.version,
            job=message.job,
            suggestion=envelope.id,
            adopted=outcome.adopted,
            reason=outcome.reason,
            policy_revision=outcome.revision,
        )
        await self.bus.publish(subjects.POLICY_DECISION, decision, cause=envelope, module=message.module)
        async with self.news:
            self.suggestions.append(message)
            self.decisions.append(decision)
            self.news.notify_all()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.news:
            await self.news.wait_for(condition)

    def states(self) -> list[ModuleState]:
        """The states told so far, repetitions left out."""
        told = [lifecycle.state for lifecycle in self.lifecycles]
        return [state for index, state in enumerate(told) if index == 0 or state != told[index - 1]]


class Mesh:
    """A bus with a registry and an arbiter, and whatever modules a test runs on it."""

    def __init__(self, url: str, stack: contextlib.AsyncExitStack) -> None:
        self.url = url
        self._stack = stack
        self.step = 0
        self._speakers: dict[str, Bus] = {}

    async def bus(self, name: str, kind: EntityKind) -> Bus:
        return await self._stack.enter_async_context(Bus.connect(self.url, name=name, kind=kind))

    async def start(self) -> None:
        await self._running(ServiceRegistry(await self.bus("service-registry", EntityKind.SERVICE_REGISTRY)))
        self.arbiter = Arbiter(await self.bus("orchestrator", EntityKind.ORCHESTRATOR))
        await self.arbiter.start()
        self.instances = await self.bus("instances", EntityKind.INSTANCE)

    async def _running(self, service: Any) -> asyncio.Task[None]:
        ready = asyncio.Event()
        task = asyncio.create_task(service.run(ready))
        self._stack.push_async_callback(end, task)
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=PATIENCE_S)
        waiting.cancel()
        if task.done():
            task.result()
        assert ready.is_set()
        return task

    async def module(self, policy: Policy, **config: Any) -> tuple[FunctionalModule, asyncio.Task[None]]:
        shadow = config.get("shadow", False)
        bus = await self.bus(module_sid(policy, shadow=shadow), EntityKind.FUNCTIONAL_MODULE)
        module = FunctionalModule(bus, policy, ModuleConfig(**config))
        return module, await self._running(module)

    async def samples(self, *, rounds: int = 1, **service_ms: float) -> None:
        for _ in range(rounds):
            self.step += 1
            for key, ms in service_ms.items():
                sid = f"j-{key.replace('_', '-')}"
                await self.publish(
                    subjects.INSTANCE_SAMPLE,
                    InstanceSample(
                        job="j",
                        sid=sid,
                        incarnation="i1",
                        cluster="east",
                        node="n1",
                        stage=int(key[1]),
                        step=self.step,
                        service_ms=ms,
                        microbatches=4,
                    ),
                    job="j",
                    sid=sid,
                )

    def seen_by(self, module: FunctionalModule) -> bool:
        """Whether it has worked in all samples of stage 0."""
        view = module.engine.observations.jobs.get("j")
        mine = [] if view is None else [one.sample for one in view.instances.values()]
        return len(mine) > 1 and all(one is not None and one.step == self.step for one in mine)

    async def publish(self, row: Subject, message: Message, **tokens: str) -> None:
        """As the instance that the subject names: nobody else is believed."""
        name = tokens["sid"]
        if name not in self._speakers:
            self._speakers[name] = await self.bus(name, EntityKind.INSTANCE)
        await self._speakers[name].publish(row, message, **tokens)
        await self._speakers[name].barrier()

    @contextlib.asynccontextmanager
    async def telemetry(self, **service_ms: float) -> AsyncIterator[None]:
        """Samples ten times a second for as long as the block lasts."""

        async def go_on() -> None:
            while True:
                await self.samples(**service_ms)
                await asyncio.sleep(0.1)

        task = asyncio.create_task(go_on())
        try:
            yield
        finally:
            await end(task)


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    assert task.done()


@pytest.fixture
async def mesh(own_server: EmbeddedServer) -> AsyncIterator[Mesh]:
    async with contextlib.AsyncExitStack() as stack:
        mesh = Mesh(own_server.url, stack)
        await mesh.start()
        yield mesh


async def test_telemetry_becomes_a_suggestion_and_it_is_adopted(mesh: Mesh) -> None:
    """Draft §4.2: ingestion, features, inference, output; §4.4(4): the orchestrator acts on it."""
    await mesh.module(ServiceTimeWeights())
    async with mesh.telemetry(s0_r0=10.0, s0_r1=30.0, s1_r0=20.0, s1_r1=20.0):
        await mesh.arbiter.until(lambda: mesh.arbiter.decisions)
    suggestion, decision = mesh.arbiter.suggestions[0], mesh.arbiter.decisions[0]
    assert suggestion.action.model_dump(exclude_none=True) == {
        "action": "set_weights",
        "stage": 0,
        "weights": {"j-s0-r0": 1.5, "j-s0-r1": 0.5},
    }
    assert "10.0 ms" in suggestion.reason
    assert suggestion.input_revision >= 3
    assert decision.adopted
    assert decision.reason.startswith("adopted: 25% of the work of stage 0 goes elsewhere")


async def test_the_example_is_adopted_on_any_job_of_two_by_two(mesh: Mesh) -> None:
    await mesh.module(load_policy(str(EXAMPLE)))
    async with mesh.telemetry(s0_r0=20.0, s0_r1=20.0, s1_r0=20.0, s1_r1=20.1):
        await mesh.arbiter.until(lambda: sum(decision.adopted for decision in mesh.arbiter.decisions) >= 2)
    assert {suggestion.action.stage for suggestion in mesh.arbiter.suggestions} == {0, 1}


async def test_lifecycle_and_registration_are_seen_from_start_to_end(mesh: Mesh) -> None:
    module, task = await mesh.module(ServiceTimeWeights())
    client = await mesh.bus("client", EntityKind.CLIENT)
    [record] = (await client.request(subjects.RESOLVE, Resolve(prefix="module"))).records
    assert (record.sid, record.kind, record.version) == ("service-time-weights", "functional-module", "1")
    assert mesh.arbiter.lifecycles[0].subscribes[0] == "dmsc.v1.telemetry.instance.*.*"
    await end(task)
    assert task.cancelled()
    assert mesh.arbiter.states() == ["registered", "active", "draining", "retired"]
    assert module.state is ModuleState.RETIRED
    found = await client.request(subjects.RESOLVE, Resolve(prefix="module"))
    assert [record.state for record in found.records if record.state != "gone"] == []


async def test_the_state_is_repeated_for_an_orchestrator_that_forgot(mesh: Mesh) -> None:
    await mesh.module(ServiceTimeWeights(), lifecycle_every_s=0.2, answer_s=0.1)
    mesh.arbiter.lifecycles.clear()
    await mesh.arbiter.until(lambda: len(mesh.arbiter.lifecycles) >= 2)
    assert mesh.arbiter.states() == ["active"]


async def test_a_shadow_suggests_and_nothing_is_adopted(mesh: Mesh) -> None:
    await mesh.module(ServiceTimeWeights(), shadow=True)
    async with mesh.telemetry(s0_r0=10.0, s0_r1=30.0):
        await mesh.arbiter.until(lambda: mesh.arbiter.decisions)
    assert not mesh.arbiter.decisions[0].adopted
    assert mesh.arbiter.decisions[0].reason.startswith("in shadow, would have been adopted")
    assert mesh.arbiter.states() == ["registered", "shadow"]


async def test_a_restarted_module_knows_what_was_measured_and_said_before(mesh: Mesh) -> None:
    _, task = await mesh.module(ServiceTimeWeights())
    async with mesh.telemetry(s0_r0=10.0, s0_r1=30.0):
        await mesh.arbiter.until(lambda: mesh.arbiter.decisions)
    await end(task)
    again, _ = await mesh.module(ServiceTimeWeights())
    view = again.engine.observations.jobs["j"]
    assert view.step >= 3
    assert view.instances["j-s0-r1"].samples >= 3
    held = view.own["stage 0"]
    assert held.decision is not None
    assert held.decision.adopted
    seen = view.instances["j-s0-r0"].samples
    await mesh.samples(s0_r0=10.0, s0_r1=30.0)
    await eventually(lambda: view.step == mesh.step)
    assert view.instances["j-s0-r0"].samples == seen + 1  # nothing was counted twice


async def test_only_the_last_minutes_are_read_again(mesh: Mesh) -> None:
    await mesh.samples(rounds=600, s0_r0=10.0)
    await asyncio.sleep(0.3)  # the age is what is tested
    await mesh.samples(rounds=2, s0_r0=10.0)
    module, _ = await mesh.module(ServiceTimeWeights(), history_s=0.25)
    jobs = module.engine.observations.jobs
    assert "j" not in jobs or jobs["j"].instances["j-s0-r0"].samples <= 2


async def test_a_raising_policy_goes_on_until_it_is_suspended(mesh: Mesh) -> None:
    class Broken(Policy):
        name = "broken"
        every_s = 0.0

        def decide(self, view, now):
            raise ZeroDivisionError("oops")

    module, task = await mesh.module(Broken(), engine=EngineConfig(max_errors=4))
    async with mesh.telemetry(s0_r0=10.0):
        await mesh.arbiter.until(lambda: mesh.arbiter.states()[-1] == "suspended")
    assert module.engine.counters.errors == 4
    assert mesh.arbiter.lifecycles[-1].reason == (
        "suspended after 4 errors in a row, the last in decide: ZeroDivisionError: oops"
    )
    assert not task.done()
    await end(task)
    assert mesh.arbiter.states() == ["registered", "active", "suspended", "draining", "retired"]


async def test_a_policy_that_hangs_does_not_stop_the_heartbeats(mesh: Mesh) -> None:
    released = threading.Event()

    class Hanging(Policy):
        name = "hanging"
        every_s = 0.0

        def decide(self, view, now):
            released.wait(NEVER_S)

    heard = asyncio.Event()
    try:
        _, task = await mesh.module(Hanging(), patience_s=0.3)
        async with mesh.telemetry(s0_r0=10.0):
            await mesh.arbiter.until(lambda: mesh.arbiter.states()[-1] == "suspended")

        async def beat(message: Message, envelope: Envelope) -> None:
            heard.set()

        await mesh.arbiter.bus.subscribe(subjects.HEARTBEAT, beat, sid="hanging")
        async with asyncio.timeout(PATIENCE_S):
            await heard.wait()
        assert "has not returned for 0.3 s" in mesh.arbiter.lifecycles[-1].reason
        await end(task)
    finally:
        released.set()


async def test_it_answers_a_request_at_once(mesh: Mesh) -> None:
    """Draft §4.2: the output is asynchronous, or synchronous to whoever asks."""
    module, _ = await mesh.module(load_policy(str(EXAMPLE)), engine=EngineConfig(every_s=3600.0))
    await mesh.samples(rounds=2, s0_r0=10.0, s0_r1=30.0)
    await eventually(lambda: mesh.seen_by(module))
    [suggestion] = (await module.answer(ModuleQuestion(job="j"))).suggestions
    assert suggestion.action.weights == {"j-s0-r0": 1.0, "j-s0-r1": 0.5}
    assert (await module.answer(ModuleQuestion(job="unknown"))).suggestions == ()


async def test_it_obeys_orders_and_retires_when_drained(mesh: Mesh) -> None:
    """Draft §4.2, lifecycle control: start, switch, enable per job, and close, while the mesh goes on."""
    module, task = await mesh.module(ServiceTimeWeights(), shadow=True)
    sid = mesh.arbiter.lifecycles[-1].sid
    assert sid == "service-time-weights-shadow-1"

    async def order(op: str, *jobs: str) -> ModuleLifecycle:
        return await mesh.arbiter.bus.command(
            subjects.MODULE_ORDER, ModuleOrder(op=op, jobs=jobs, reason="a test"), sid=sid
        )

    assert (await order("activate")).state is ModuleState.ACTIVE
    assert (await order("activate")).state is ModuleState.ACTIVE  # repeated, it changes nothing
    with pytest.raises(BadInput, match="for which job"):
        await order("disable")
    assert (await order("disable", "j")).without == ("j",)
    await mesh.samples(rounds=4, s0_r0=10.0, s0_r1=30.0)
    await eventually(lambda: "j" in module.engine.observations.jobs)
    assert module.engine.counters.decisions == 0
    assert (await order("enable", "j")).without == ()
    async with mesh.telemetry(s0_r0=10.0, s0_r1=30.0):
        await mesh.arbiter.until(lambda: any(decision.adopted for decision in mesh.arbiter.decisions))
    assert (await order("shadow")).state is ModuleState.SHADOW
    assert (await order("drain")).state is ModuleState.DRAINING
    async with asyncio.timeout(PATIENCE_S):
        await task
    assert mesh.arbiter.states() == ["registered", "shadow", "active", "shadow", "draining", "retired"]


class Auditor(Policy):
    """Notes what instances refused, from their own audit (draft §6.3)."""

    name = "auditor"
    every_s = 0.1

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def reads(self, view: JobView, now: float) -> list[StoreRead]:
        where = {"outcome": "refused"}
        return [self.read(view, sid, "audit", where=where, columns=("reason",)) for sid in view.instances]

    def on_store_rows(self, rows: StoreRows, at: float) -> None:
        for row in rows.records():
            self.refused[rows.member.sid] = str(row["reason"])

    def decide(self, view: JobView, now: float) -> PolicySuggestion | None:
        found = ", ".join(f"{sid}: {reason}" for sid, reason in sorted(self.refused.items()))
        return self.note(view, found) if found else None


async def test_a_policy_reads_local_stores_and_a_silent_one_delays_nothing(
    mesh: Mesh, tmp_path: Path
) -> None:
    member = Member(sid="j-s0-r0", incarnation="i1")
    async with LocalStore(tmp_path, member) as store:
        store.add("audit", {"what": "step commit", "outcome": "obeyed", "reason": ""})
        store.add("audit", {"what": "step commit", "outcome": "refused", "reason": "fenced: epoch 1"})
        chronicle = StoreRecorder(store, 0)
        await mesh.instances.serve(subjects.STORE_QUERY, chronicle.read, job="j", sid=member.sid)
        module, _ = await mesh.module(Auditor())
        async with mesh.telemetry(s0_r0=10.0, s0_r1=30.0):  # of which the second keeps no store
            await mesh.arbiter.until(lambda: mesh.arbiter.suggestions)
    assert mesh.arbiter.suggestions[0].reason == "j-s0-r0: fenced: epoch 1"
    assert module.engine.counters.errors == 0
