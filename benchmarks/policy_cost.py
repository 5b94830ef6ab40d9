"""What a policy costs: its processor time at 10,000 instances, and the way from a suggestion to the routes.

    python benchmarks/policy_cost.py [--instances 10000] [--seconds 20] [--rounds 300] [--json]

Real processes on a real server, on loopback:

* telemetry: `dmsc policy run service-time-weights` while every instance sends a sample a second, spread over
  `--jobs` jobs; processor time of the module's process ÷ wall time, and how long a question to it takes
  meanwhile (it waits for its turn, so that is how far behind the module is)
* adoption: from the moment that a module sends its suggestion until an instance's connection has the route
  table that follows, with 1,000 instances registered and beating; arbitration and the policies of the
  orchestrator run here, registry and router are processes of their own
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil

from benchmarks.harness.command import bench, command
from benchmarks.harness.figures import percentile
from benchmarks.harness.processes import child
from benchmarks.registry_mesh import TOKEN, mesh, register, send
from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import digest_of
from bus.messaging.key_value import Change
from bus.wire import codec
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.module_reputation import ReputationConfig
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.queue.job_queue import JobQueue
from entities.orchestrator.queue.mesh_slots import queue_rules
from entities.orchestrator.transaction.reduction_layout import ReductionLayouts
from schemas.automation import Automation, AutomationSpec
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, DmscError
from schemas.job import JobEvent
from schemas.job_file.parallel import ParallelSpec
from schemas.module_status import ModuleAnswer, ModuleQuestion
from schemas.names import MESH
from schemas.policy import ModuleLifecycle, ModuleState, PolicySuggestion, SetWeights
from schemas.registry import Endpoint, Heartbeat, InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, NodeRegistration, StagePolicy
from schemas.step import Member
from schemas.telemetry import InstanceSample, LinkSample
from schemas.usage import JobUsage

STAGES = 4
ROUTED = 1_000
BARS = {"telemetry": "≤ 1 core", "adoption": "p99 ≤ 50 ms"}
MODULE = "service-time-weights"


def dmsc(url: str, *arguments: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A `dmsc` process, ended afterwards."""
    environment = {"DMSC_BUS": url, "DMSC_BUS_TOKEN": TOKEN}
    return child("dmsc", *arguments, "--log-level", "warning", environment=environment)


# --- telemetry -------------------------------------------------------------------------------------------
def samples(bus: Bus, instances: int, jobs: int) -> list[tuple[str, bytes]]:
    """One message of each instance, as they travel."""
    found = []
    for number in range(instances):
        job = f"j{number % jobs}"
        sid = f"{job}-s{number % STAGES}-r{number}"
        sample = InstanceSample(
            job=job,
            sid=sid,
            incarnation=f"i{number}",
            cluster="c0",
            node=f"n{number % 97}",
            stage=number // jobs % STAGES,
            step=7,
            queue=2,
            in_flight=1,
            microbatches=12,
            service_ms=10.0 + number % 7,
            forward_ms=3.0,
            backward_ms=7.0,
            busy=0.9,
            tokens_per_s=1e4,
            links=(LinkSample(peer=f"{job}-s0-r0", sent_bytes=10_000, transfers=10, transfer_ms=20.0),),
        )
        data = codec.encode(sample, bus.sender_map, f"s-{number}")
        found.append((subjects.INSTANCE_SAMPLE(job=job, sid=sid), data))
    return found


async def ask(bus: Bus) -> ModuleAnswer:
    question = ModuleQuestion(job="j0")
    answer = await bus.request(
        subjects.MODULE_QUESTION, question, timeout_s=30.0, module=MODULE, version="active"
    )
    assert isinstance(answer, ModuleAnswer)
    return answer


async def telemetry(instances: int, jobs: int, seconds: float) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server, bus, _ = await stack.enter_async_context(mesh(Path(folder), False))
        sender = await stack.enter_async_context(
            Bus.connect(server.url, name="instances", kind=EntityKind.INSTANCE, token=TOKEN)
        )
        module = psutil.Process(
            (await stack.enter_async_context(dmsc(server.url, "policy", "run", MODULE))).pid
        )
        while True:
            with contextlib.suppress(DmscError):
                await ask(bus)
                break
            await asyncio.sleep(0.1)
        messages = samples(sender, instances, jobs)
        # until all are known and windows begin to fill
        await send(sender.connection.send, messages, time.perf_counter() + 4.0)
        waits: list[float] = []

        async def asking() -> None:
            while True:
                begun = time.perf_counter()
                await ask(bus)
                waits.append(1e3 * (time.perf_counter() - begun))
                await asyncio.sleep(0.2)

        before, began = module.cpu_times(), time.perf_counter()
        task = asyncio.create_task(asking())
        sent = await send(sender.connection.send, messages, began + seconds)
        took_s = time.perf_counter() - began
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        begun = time.perf_counter()
        await ask(bus)
        behind_ms = 1e3 * (time.perf_counter() - begun)
        after = module.cpu_times()  # with what it did of the window's samples only now
        used = after.user + after.system - before.user - before.system
        return {
            "instances": instances,
            "jobs": jobs,
            "sent_per_s": sent / took_s,
            "cores": used / took_s,
            "us_per_sample": 1e6 * used / sent,
            "question_ms": {"p50": percentile(waits, 0.5), "p99": percentile(waits, 0.99)},
            "behind_ms": behind_ms,
        }


# --- adoption --------------------------------------------------------------------------------------------
def records() -> list[ServiceRecord]:
    return [
        ServiceRecord(
            sid=f"bench-s{number % STAGES}-r{number}",
            prefix=f"train/bench/stage/{number % STAGES}",
            kind=EntityKind.INSTANCE,
            incarnation=f"i{number}",
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster="c0", node=f"n{number % 97}"),
            job="bench",
            stage=number % STAGES,
        )
        for number in range(ROUTED)
    ]


async def beat(bus: Bus, living: list[ServiceRecord]) -> None:
    """Every instance once a second."""
    beats = [
        (
            subjects.HEARTBEAT(sid=one.sid),
            codec.encode(
                Heartbeat(sid=one.sid, incarnation=one.incarnation, state=one.state, digest=digest_of(one)),
                bus.sender_map,
                one.sid,
            ),
        )
        for one in living
    ]
    while True:
        await send(bus.connection.send, beats, time.perf_counter() + 60.0)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Journal:
    """What the desk tells of an adoption goes on the job's stream, as it does in a run."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.record = SimpleNamespace(user="", automated=Automation.ACT, usage=JobUsage(), pins=())

    async def tell(self, kind: str, text: str) -> None:
        event = JobEvent.model_validate({"job": "bench", "kind": kind, "at": time.time(), "text": text})
        await self._bus.append(subjects.JOB_EVENT, event, job="bench")


async def always() -> None:
    """This orchestrator leads."""


async def orchestrate(bus: Bus, living: list[ServiceRecord]) -> tuple[PolicyService, PolicyDistribution]:
    """Arbitration and policies of a job that runs on all these instances."""
    view = MeshView()

    async def registered(message: NodeRegistration, envelope: Envelope) -> Ack:
        await view.service(message)
        return Ack()

    await bus.serve(subjects.MESH_REGISTRATION, registered)
    while not view.routers():
        await view.next_change()
    communication = PolicyDistribution(bus, view)
    stages = tuple(
        tuple(Member(sid=one.sid, incarnation=one.incarnation) for one in living if one.stage == stage)
        for stage in range(STAGES)
    )
    run = SimpleNamespace(
        job=SimpleNamespace(
            policies=communication,
            instances=SimpleNamespace(
                deployed=True, units=(), lost=set(), layouts=ReductionLayouts(), stages=lambda: stages
            ),
            store=Journal(bus),
            spec=SimpleNamespace(
                parallel=ParallelSpec(),
                automation=AutomationSpec(),
                training=SimpleNamespace(microbatches=4),
            ),
        ),
        holding=SimpleNamespace(replicas=1),
        actions=SimpleNamespace(
            freed=list,
            routes_objection=lambda action, by: "",
            routed=lambda action, by: None,
            unrouted=lambda knob, by: None,
        ),
        placements=(),
        training=SimpleNamespace(standbys=SimpleNamespace(revise=lambda: None)),
        step=0,
    )
    standing = ReputationConfig(rate_per_s=1e6, burst=1_000_000)
    config = ArbitrationConfig(cooldown_s=0.0, standing=standing)
    runs = {"bench": cast(JobRun, run)}
    desk = PolicyService(bus, runs, view, JobQueue(view, {}, {}, queue_rules()), always, config)
    await bus.subscribe(subjects.SUGGESTION, desk.suggestion)
    await bus.serve(subjects.MODULE_LIFECYCLE, desk.lifecycle)
    communication.issue(
        CommunicationPolicy(
            job="bench",
            revision=1,
            entry_gateway="gateway-c0",
            clusters=("c0",),
            reason="initial",
            stages=tuple(StagePolicy(stage=stage, window=4) for stage in range(STAGES)),
        )
    )
    return desk, communication


async def adoption(rounds: int) -> dict[str, Any]:
    """Milliseconds from a suggestion to its table in an instance's hands."""
    living = records()
    stage = [one.sid for one in living if one.stage == 0]
    seen: dict[float, asyncio.Future[float]] = {}

    async def written(change: Change) -> None:
        table = change.message
        if table is not None and table.stage == 0 and table.entries:
            waiting = seen.get(round(table.entries[0].weight, 4))
            if waiting is not None and not waiting.done():
                waiting.set_result(time.perf_counter())

    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server, bus, _ = await stack.enter_async_context(mesh(Path(folder), True))

        async def connected(name: str, kind: EntityKind) -> Bus:
            return await stack.enter_async_context(Bus.connect(server.url, name=name, kind=kind, token=TOKEN))

        smo = await connected("orchestrator", EntityKind.ORCHESTRATOR)
        fm = await connected("bench-module", EntityKind.FUNCTIONAL_MODULE)
        mi = await connected(living[0].sid, EntityKind.INSTANCE)
        await register(bus, living)
        stack.push_async_callback(_end, asyncio.create_task(beat(bus, living)))
        await stack.enter_async_context(dmsc(server.url, "run", "router", "--cluster", "c0"))
        _, communication = await orchestrate(smo, living)
        stack.push_async_callback(communication.close)
        await mi.bucket(subjects.ROUTE_TABLE).watch(written)
        alive = ModuleLifecycle(module="bench-module", version="1", state=ModuleState.ACTIVE)
        await fm.command(subjects.MODULE_LIFECYCLE, alive, owner=MESH, module="bench-module")
        found = []
        for number in range(rounds + 10):
            share = 1.2 + 0.3 * (number % 2)  # of the first half; the mean weight is 1
            weights = {
                sid: share if index < len(stage) / 2 else 2.0 - share for index, sid in enumerate(stage)
            }
            suggestion = PolicySuggestion(
                module="bench-module",
                version="1",
                job="bench",
                action=SetWeights(stage=0, weights=weights),
                confidence=0.9,
                reason="a benchmark",
                input_revision=0,
                valid_s=600.0,
            )
            seen = {round(share, 4): asyncio.get_running_loop().create_future()}
            begun = time.perf_counter()
            await fm.publish(subjects.SUGGESTION, suggestion, owner=MESH, module="bench-module")
            async with asyncio.timeout(30):
                took_ms = 1e3 * (await seen[round(share, 4)] - begun)
            if number >= 10:
                found.append(took_ms)
            await asyncio.sleep(0.02)
    return {
        "instances": ROUTED,
        "rounds": rounds,
        "p50_ms": percentile(found, 0.5),
        "p99_ms": percentile(found, 0.99),
        "max_ms": max(found),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    if load := found.get("telemetry"):
        yield (
            f"telemetry: {load['sent_per_s']:,.0f} samples/s of {load['instances']:,} instances in "
            f"{load['jobs']} jobs: {load['cores']:.2f} cores ({load['us_per_sample']:.0f} µs a sample), bar "
            f"{BARS['telemetry']}; a question meanwhile p50 {load['question_ms']['p50']:.0f} ms, "
            f"p99 {load['question_ms']['p99']:.0f} ms; at the end {load['behind_ms']:.0f} ms behind"
        )
    if way := found.get("adoption"):
        yield (
            f"suggestion → route table in use, {way['instances']:,} instances: p50 {way['p50_ms']:.1f} ms, "
            f"p99 {way['p99_ms']:.1f} ms, longest {way['max_ms']:.1f} ms ({way['rounds']} times), bar "
            f"{BARS['adoption']}"
        )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.only != "adoption":
        found["telemetry"] = await telemetry(options.instances, options.jobs, options.seconds)
    if options.only != "telemetry":
        found["adoption"] = await adoption(options.rounds)
    return found


if __name__ == "__main__":
    arguments = command(__doc__, instances=10_000, jobs=10, seconds=20.0, rounds=300)
    arguments.add_argument("--only", choices=("telemetry", "adoption"))
    bench(arguments, measure, lines)
