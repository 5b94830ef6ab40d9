"""Modules on a real bus are asked about a fault at hand; whoever is late, floods or lies costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging import streams
from bus.server.embedded import EmbeddedServer
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.faults_at_hand.fault_questions import FaultQuestions
from entities.orchestrator.policy.policy_service import PolicyService
from entities.service_registry.service import ServiceRegistry
from policies.contrib.port_faults import PortFaults
from policies.kit.engine import Event
from policies.kit.policy import Policy
from policies.module.service import FunctionalModule, ModuleConfig
from policies.scoring.replay import PolicyReplay
from schemas.automation import Automation
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.fault_choices import FaultAnswer, FaultQuestion, FaultRuling, Retry, Wait
from schemas.module_status import ModuleQuery
from schemas.names import MESH
from schemas.observation import Observation
from schemas.policy import ModuleState, PolicyDecision
from tests.builders.jobs import job as job_record
from tests.builders.policies import fault_answer, fault_question
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually


class Patient(Policy):
    """Says Wait about everything, for as long as it may not."""

    name = "patient"

    def decide(self, view, now):
        return None

    def on_fault(self, fault, view):
        return self.wait(fault, 1e6, reason=f"fault {len(view.faults) + 1} of {fault.job}")


class Mesh:
    """An orchestrator's side for job j, and what was said on the bus."""

    def __init__(self, url: str, stack: contextlib.AsyncExitStack) -> None:
        self._url = url
        self._stack = stack
        self.said: list[FaultQuestion | FaultAnswer] = []
        self.decisions: list[PolicyDecision] = []
        self.view: Any = SimpleNamespace(
            runs=lambda sid: True, nodes={"a-n": None}, automation=Automation.ACT
        )

    async def bus(self, name: str, kind: EntityKind) -> Bus:
        return await self._stack.enter_async_context(Bus.connect(self._url, name=name, kind=kind))

    async def start(self) -> None:
        registry = ServiceRegistry(await self.bus("service-registry", EntityKind.SERVICE_REGISTRY))
        await self._running(registry)
        bus = await self.bus("orchestrator", EntityKind.ORCHESTRATOR)
        await streams.provision(bus.connection)
        run = SimpleNamespace(job=SimpleNamespace(store=SimpleNamespace(record=job_record("j"))))
        spawn = await self._stack.enter_async_context(term())
        nothing: Any = None
        runs: Any = {"j": run}
        config = ArbitrationConfig(fault_answer_s=PATIENCE_S)
        self.policies = PolicyService(bus, runs, self.view, nothing, asyncio.Event().wait, config)
        self.questions = FaultQuestions(bus, self.policies, runs, self.view, spawn, config)
        await bus.serve(subjects.MODULE_LIFECYCLE, self.policies.lifecycle)
        await bus.subscribe(subjects.FAULT_ANSWER, self.questions.answer)
        witness = await self.bus("witness", EntityKind.CLIENT)
        for row in (subjects.FAULT_QUESTION, subjects.FAULT_ANSWER):
            await witness.subscribe(row, self._heard)
        await witness.subscribe(subjects.POLICY_DECISION, self._decided)

    def within(self, seconds: float) -> None:
        """How long answers may take from now on."""
        config = ArbitrationConfig(fault_answer_s=seconds)
        self.questions._config = config

    async def _heard(self, message: FaultQuestion | FaultAnswer, envelope: Envelope) -> None:
        self.said.append(message)

    async def _decided(self, message: PolicyDecision, envelope: Envelope) -> None:
        self.decisions.append(message)

    async def module(self, policy: Policy, **config: Any) -> FunctionalModule:
        bus = await self.bus(policy.name, EntityKind.FUNCTIONAL_MODULE)
        module = FunctionalModule(bus, policy, ModuleConfig(**config))
        await self._running(module)
        return module

    async def _running(self, service: FunctionalModule | ServiceRegistry) -> None:
        ready = asyncio.Event()
        self._stack.push_async_callback(ended, asyncio.create_task(service.run(ready)))
        await asyncio.wait_for(ready.wait(), PATIENCE_S)

    async def ask(self, id: str) -> FaultRuling | None:
        return await self.questions.ask("j", lambda: fault_question(id=id), {})

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


@contextlib.asynccontextmanager
async def term() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """What spawns tasks of an orchestrator's term. Who waits for an answer that never comes ends with it."""
    spawned: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as tasks:
        try:
            yield lambda work: spawned.append(tasks.create_task(work))
        finally:
            for task in spawned:
                task.cancel()


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)


@pytest.fixture
async def mesh(own_server: EmbeddedServer) -> AsyncIterator[Mesh]:
    async with contextlib.AsyncExitStack() as stack:
        mesh = Mesh(own_server.url, stack)
        await mesh.start()
        yield mesh


async def test_a_module_answers_and_a_replay_of_the_record_gives_the_same_bytes(mesh: Mesh) -> None:
    assert await mesh.ask("q0") is None, "nobody answers: nobody is asked"
    await mesh.module(Patient())
    rulings = [await mesh.ask(f"q{number}") for number in (1, 2)]
    assert [ruling and (ruling.by, ruling.action) for ruling in rulings] == [("patient", Wait(for_s=4.0))] * 2
    await eventually(lambda: len(mesh.decisions) == 2 and len(mesh.said) == 4)
    assert mesh.decisions[0].reason == "adopted: wait for at most 4.0 s; fault 1 of j"
    assert [question.id for question in mesh.of(FaultQuestion)] == ["q1", "q2"]
    replay = PolicyReplay(Patient())
    for question in mesh.of(FaultQuestion):
        event = Event(row=subjects.FAULT_QUESTION, message=question, id=question.id, at=question.at + 9.0)
        replay.feed(event)
    assert [answer.model_dump_json() for answer in replay.answers] == [
        answer.model_dump_json() for answer in mesh.of(FaultAnswer)
    ]


async def test_a_module_that_is_off_or_hangs_is_not_waited_for(mesh: Mesh) -> None:
    released = threading.Event()

    class Hanging(Patient):
        name = "hanging"

        def on_fault(self, fault, view):
            released.wait(NEVER_S)

    try:
        mesh.view.automation = Automation.OFF
        await mesh.module(Hanging(), patience_s=NEVER_S)
        assert await mesh.ask("q0") is None
        mesh.view.automation = Automation.ACT
        mesh.within(0.02)
        for number in range(1, 4):
            ruling = await mesh.ask(f"q{number}")
            assert ruling is not None
            assert (ruling.by, ruling.way) == ("orchestrator", "replace")
        mesh.within(NEVER_S)
        ruling = await asyncio.wait_for(mesh.ask("q4"), PATIENCE_S)  # it is asked, and nobody waits
        assert ruling is not None
        assert ruling.by == "orchestrator"
        assert mesh.of(FaultAnswer) == []
    finally:
        released.set()


async def test_who_floods_lies_or_raises_changes_nothing(mesh: Mesh) -> None:
    lied = threading.Event()

    class Broken(Patient):
        """Keeps the question open until the liar has spoken."""

        name = "broken"

        def on_fault(self, fault, view):
            lied.wait(PATIENCE_S)
            return "wait"

    await mesh.module(Patient())
    await mesh.module(Broken())
    liar = await mesh.bus("liar", EntityKind.FUNCTIONAL_MODULE)
    place = {"owner": MESH, "module": "patient"}

    async def say(answer: FaultAnswer) -> None:
        await liar.publish(subjects.FAULT_ANSWER, answer, **place)

    async def lie(question: FaultQuestion, envelope: Envelope) -> None:
        await liar.connection.send(subjects.FAULT_ANSWER(**place), b"garbage")
        await say(fault_answer(Retry(), "patient", question=question.id))
        await say(fault_answer(Retry(), "patient", question=question.id, job="another"))
        for _ in range(300):
            await say(fault_answer(Retry(), "patient", question="never-asked"))
        await liar.barrier()
        lied.set()

    await liar.subscribe(subjects.FAULT_QUESTION, lie)
    ruling = await mesh.ask("q1")
    assert ruling is not None
    assert (ruling.by, ruling.way) == ("patient", "wait")
    client: Any = None
    await eventually(lambda: len(mesh.of(FaultAnswer)) >= 304)
    listed = {one.module: one for one in (await mesh.policies.query(ModuleQuery(), client)).modules}
    assert (listed["patient"].state, listed["patient"].strikes) == (ModuleState.ACTIVE, 0)

    def told(reason: str) -> list[PolicyDecision]:
        return [one for one in mesh.decisions if not one.adopted and one.reason == reason]

    await eventually(lambda: told("it has not registered as one that answers about faults of this job"))
    await eventually(lambda: told("the question was about job j"))
    await eventually(lambda: told("nobody asked that"))
    assert len(mesh.decisions) < 100, "a flood is not answered one by one"


async def test_a_fabric_s_monitoring_tells_which_node_hangs_at_a_lost_port(mesh: Mesh) -> None:
    """What `fault_signatures` learnt from recordings, fed by observations that come in while jobs run."""
    module = await mesh.module(PortFaults())
    drawn, fabric = np.random.default_rng(7), await mesh.bus("gateway-a", EntityKind.GATEWAY)
    usual = drawn.uniform(1e4, 1e5, (8, 2))
    ended_at = time.time()

    async def sampled(lost: bool) -> None:
        for port, (received, sent) in enumerate(usual * drawn.normal(1, 0.02, usual.shape)):
            dead = lost and port == 3
            values = {"received": 0.0 if dead else received, "sent": 0.0 if dead else sent}
            said = Observation(
                source="fabric",
                what="port",
                about=f"leaf{port // 4}/Ethernet{port % 4}",
                values=values | {"carrier": float(dead)},
                labels={"node": "a-n" if port == 3 else f"a-n{port}"},
            )
            await fabric.publish(subjects.OBSERVATION, said, source="fabric")

    async def asked(id: str, kind: str) -> tuple[str, str, tuple[str, ...]] | None:
        question = fault_question(id=id, kind=kind, at=ended_at)
        ruling = await mesh.questions.ask("j", lambda: question, {})
        assert ruling is not None
        return ruling.by, ruling.reason, getattr(ruling.action, "avoid", ())

    for _ in range(20):
        await sampled(lost=False)
    await fabric.barrier()
    await eventually(lambda: module.engine.counters.events >= 160)
    assert await asked("q1", "unreachable") == ("orchestrator", "nobody says otherwise", ())
    await sampled(lost=True)
    await fabric.barrier()
    await eventually(lambda: module.engine.counters.events >= 168)
    by, reason, avoided = await asked("q2", "instance") or ("", "", ())
    assert (by, avoided) == ("port-faults", ("a-n",))
    assert "leaf0/Ethernet3: link down, 0% of its" in reason
