"""The mesh of the registry's benchmarks: a server, the registry as a process of its own, instances that beat.

    python benchmarks/registry_mesh.py URL JOB INSTANCES

sends the heartbeats of a job's instances until it is ended; `beating` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import nats
import psutil

from benchmarks.harness.processes import child
from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.wire import codec
from schemas.envelope import EntityKind, Sender
from schemas.errors import DmscError
from schemas.registry import (
    Capability,
    Endpoint,
    Heartbeat,
    InstanceState,
    ReleaseJob,
    Resolve,
    ServiceRecord,
    StateChange,
    TensorSchema,
)
from schemas.signals import Registration, RegistrationLease

STAGES, CLUSTERS = 8, 4
BOUNDARY = (TensorSchema(shape=(1024, 2048), dtype="bfloat16"),)
TOKEN = "bench:bench"
REGISTRY = subjects.REGISTRATION.answerer({})


def record(job: str, number: int, state: InstanceState = InstanceState.PENDING) -> ServiceRecord:
    """An instance as workers register them."""
    stage = number % STAGES
    cluster = f"c{number // STAGES % CLUSTERS}"
    return ServiceRecord(
        sid=f"{job}-s{stage}-r{number}",
        prefix=f"train/{job}/stage/{stage}",
        kind=EntityKind.INSTANCE,
        incarnation=f"i{number:06d}",
        state=state,
        endpoint=Endpoint(cluster=cluster, node=f"{cluster}-n{number % 97}", pid=number, address="127.0.0.1"),
        capability=Capability(memory_bytes=16 << 30, flops_per_s=1e12),
        input_schema=BOUNDARY,
        output_schema=BOUNDARY,
        tags=(f"stage:{stage}", f"job:{job}"),
        job=job,
        stage=stage,
        version="1",
    )


@contextlib.asynccontextmanager
async def mesh(folder: Path, sync: bool) -> AsyncIterator[tuple[EmbeddedServer, Bus, psutil.Process]]:
    """A server, a client's connection, and the registry's process, ready."""
    async with (
        EmbeddedServer(folder, token=TOKEN, sync_always=sync) as server,
        Bus.connect(server.url, name="bench", kind=EntityKind.CLIENT, token=TOKEN) as bus,
    ):
        environment = {"DMSC_BUS": server.url, "DMSC_BUS_TOKEN": TOKEN}
        starting = child("dmsc", "run", "service-registry", "--log-level", "warning", environment=environment)
        async with starting as registry:
            while True:
                with contextlib.suppress(DmscError):
                    await bus.request(subjects.RESOLVE, Resolve(sid="nobody"), timeout_s=1.0)
                    break
                await asyncio.sleep(0.1)
            yield server, bus, psutil.Process(registry.pid)


async def register(bus: Bus, records: list[ServiceRecord]) -> float:
    """All at once, each asked once; seconds until the last one is answered."""
    asked = [
        (
            subjects.REGISTRATION(sid=one.sid),
            codec.encode(Registration(record=one), bus.sender_map, bus.next_id()),
        )
        for one in records
    ]
    with contextlib.ExitStack() as stack:
        questions = []
        began = time.perf_counter()
        for subject, payload in asked:
            inbox, question = stack.enter_context(
                bus.connection.question(subject, payload, answerer=REGISTRY)
            )
            questions.append(question)
            await bus.connection.send(subject, payload, reply=inbox)
        for question in questions:
            answer = codec.decode_answer((await question.answer).data)
            assert isinstance(answer, RegistrationLease), answer
        return time.perf_counter() - began


async def storm(bus: Bus, records: list[ServiceRecord]) -> float:
    """As instances do it, each repeating what is not answered; seconds until the last one is answered."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for one in records:
            group.create_task(
                bus.command(subjects.REGISTRATION, Registration(record=one), deadline_s=120, sid=one.sid)
            )
    return time.perf_counter() - began


async def release(bus: Bus, job: str) -> None:
    await bus.command(subjects.RELEASE_JOB, ReleaseJob(job=job), deadline_s=120)


async def told_ms(agent: Bus, moved: StateChange, seen: asyncio.Future[float]) -> float:
    """Milliseconds from telling the registry of a change until `seen` has the time at which it was seen."""
    sent = time.perf_counter()
    await agent.command(subjects.STATE_CHANGE, moved, deadline_s=30, sid=moved.sid)
    async with asyncio.timeout(30):
        return (await seen - sent) * 1e3


@contextlib.asynccontextmanager
async def beating(url: str, job: str, instances: int) -> AsyncIterator[None]:
    """Every instance beats once a second, from another process, from here on."""
    async with child(__file__, url, job, str(instances), until_line=True):
        yield


async def beat(url: str, job: str, instances: int) -> None:
    """What `beating` starts: as many instances' heartbeats, spread over each second."""
    user, _, password = TOKEN.partition(":")
    client = await nats.connect(url, user=user, password=password)
    beats = []
    for number in range(instances):
        one = record(job, number)
        sender = codec.sender_map(Sender(name=one.sid, kind=one.kind, incarnation=one.incarnation))
        said = Heartbeat(sid=one.sid, incarnation=one.incarnation, state=one.state, digest="0011aabb")
        beats.append((subjects.HEARTBEAT(sid=one.sid), codec.encode(said, sender, f"{number}")))
    print("beating", flush=True)
    while True:
        await send(client.publish, beats, time.perf_counter() + 60.0)


async def send(
    publish: Callable[[str, bytes], Awaitable[Any]], messages: Sequence[tuple[str, bytes]], until: float
) -> int:
    """Each message once a second, evenly spread over it; returns how many."""
    sent, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < until:
        due = int((now - began) * len(messages))
        while sent < due:
            await publish(*messages[sent % len(messages)])
            sent += 1
        await asyncio.sleep(0.005)
    return sent


if __name__ == "__main__":
    asyncio.run(beat(sys.argv[1], sys.argv[2], int(sys.argv[3])))
