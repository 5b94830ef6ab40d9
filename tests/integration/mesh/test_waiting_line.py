"""Jobs that wait for room, on a real mesh: in order of their submission, and parked ones before all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from bus.server.embedded import EmbeddedServer
from schemas.gateway_api import MeshStatus
from schemas.job import JobEvent, JobSpec, JobState
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.own_mesh import OwnMesh, Witness
from tests.integration.mesh.undisturbed import undisturbed_at
from tests.patience import PATIENCE_S

SLOTS = 2
"""In each of two clusters."""
LONG = 100_000
"""Steps of a job that is cancelled."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnMesh]:
    folder = tmp_path_factory.mktemp("own")
    server = EmbeddedServer(folder / "nats", sync_always=False)
    asyncio.run(server.start())
    mesh = OwnMesh(folder, [server], slots=SLOTS)
    try:
        mesh.start_all("smo-1")
        yield mesh
    finally:
        mesh.stop_all()
        asyncio.run(server.stop())


def of_slots(name: str, slots: int, steps: int = 4) -> JobSpec:
    stages = 2 if slots > 1 else 1
    job = tiny_job(
        name,
        training={"steps": steps, "checkpoint_every": 0, "validation_microbatches": 0},
        parallel={"stages": stages, "replicas": slots // stages},
    )
    return job if steps < LONG else padded(job, pad_ms=40.0)


async def ran(client: Witness, job: str) -> float:
    """When its first step was committed."""
    async for event in client.events(job):
        if event.result is not None:
            return event.at
    pytest.fail(f"{job} ended without a step: {(await client.record(job)).reason}")


async def said(client: Witness, job: str, text: str) -> JobEvent:
    async with asyncio.timeout(PATIENCE_S):
        async for event in client.events(job):
            if text in event.text:
                return event
    pytest.fail(f"{job} never said {text!r}")


async def done(client: Witness, job: str) -> list[JobEvent]:
    async with asyncio.timeout(PATIENCE_S):
        record = await client.ended(job)
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    assert record.weights.sha256 == await undisturbed_at(client, record.spec)
    return [event async for event in client.events(job)]


async def test_six_small_jobs_do_not_overtake_a_large_one(own: OwnMesh) -> None:
    """Half of the mesh is free all the while: each of them would fit, the large one does not."""
    async with own.client() as client:
        await client.ready()
        holder = await client.submit(of_slots("holds-half", SLOTS, LONG))
        await client.until_step(holder, 1)
        large = await client.submit(of_slots("large", 2 * SLOTS))
        await said(client, large, "needs 4 slots")
        small = [await client.submit(of_slots(f"small-{number}", 1)) for number in range(6)]
        for job in small:
            await said(client, job, f"behind {large}")
        assert not [job for job in (large, *small) if (await client.record(job)).state is not JobState.QUEUED]
        await client.ask("job.cancel", job=holder)
        over = (await done(client, large))[-1].at
        for job in small:
            await done(client, job)
            assert await ran(client, job) > over, "it began before the large one was done"


async def test_a_parked_job_precedes_one_that_never_started(own: OwnMesh) -> None:
    """That one was submitted first, and waits for more slots than are free; the parked one fits beside it."""
    async with own.client() as client:
        await client.ready()
        own.kill("agent-b")
        await until_nodes(client, 1)
        never = await client.submit(of_slots("never-started", 2 * SLOTS))
        await said(client, never, "slots")  # more than there are: it holds nobody up
        holder = await client.submit(of_slots("holds-one", 1, LONG))
        parked = await client.submit(padded(of_slots("parked", 1, 40), pad_ms=5.0))
        await client.until_step(holder, 1)
        await client.until_step(parked, 8)
        await client.ask("job.park", job=parked)
        await said(client, parked, "parked by rita")
        own.start("agent-b")
        await until_nodes(client, 2)  # now the whole mesh has room for it, and three slots are free
        assert (await client.record(never)).state is JobState.QUEUED
        await client.ask("job.resume", job=parked)
        over = (await done(client, parked))[-1].at
        assert (await client.record(never)).state is JobState.QUEUED
        await client.ask("job.cancel", job=holder)
        await done(client, never)
        assert await ran(client, never) > over


async def until_nodes(client: Witness, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await client.ask("mesh.read")
            assert isinstance(status, MeshStatus)
            if len(status.nodes) == count and all(node.warm for node in status.nodes):
                return
            await asyncio.sleep(0.1)
