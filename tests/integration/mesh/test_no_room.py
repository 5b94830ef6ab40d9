"""A mesh without room, with real processes: a healthy job goes on; one that has nothing left, or that a
person wants to wait, is parked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from bus.tap.live_tap import Tap
from schemas.cluster import InstanceStart
from schemas.errors import Conflict
from schemas.gateway_api import ScaleJob
from schemas.job import ENDED, JobEvent, JobRecord, JobState
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.own_mesh import OwnMesh, Witness
from tests.integration.mesh.undisturbed import undisturbed_at
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnMesh]:
    """One slot in each of two clusters."""
    folder = tmp_path_factory.mktemp("own")
    server = EmbeddedServer(folder / "nats", sync_always=False)
    asyncio.run(server.start())
    mesh = OwnMesh(folder, [server], slots=1)
    try:
        mesh.start_all("smo-1")
        yield mesh
    finally:
        mesh.stop_all()
        asyncio.run(server.stop())


async def until(client: Witness, job: str, condition: Callable[[JobEvent], bool]) -> JobEvent:
    """The first event like that, from the job's start."""
    async with asyncio.timeout(PATIENCE_S):
        async for event in client.events(job):
            if condition(event):
                return event
    pytest.fail(f"{job} ended before: {(await client.record(job)).reason}")


async def done(client: Witness, job: str, sha256: str) -> JobRecord:
    async with asyncio.timeout(PATIENCE_S):
        record = await client.ended(job)
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    assert record.weights.sha256 == sha256
    return record


async def test_a_job_with_nothing_left_is_parked_and_goes_on_when_there_is_room(own: OwnMesh) -> None:
    async with own.client() as client:
        await client.ready()
        spec = tiny_job(
            "parks",
            training={"steps": 50, "checkpoint_every": 6, "validation_microbatches": 0},
            parallel={"stages": 2, "replicas": 1},
        )
        spec = padded(spec, pad_ms=10.0)
        job = await client.submit(spec)
        later = await client.submit(tiny_job("waits"))
        behind = await until(client, later, lambda event: event.state is JobState.QUEUED and bool(event.text))
        assert "submitted" in behind.text or "slots" in behind.text
        await until(client, job, lambda event: event.result is not None and event.result.step >= 14)
        own.kill("agent-b")
        parked = await until(client, job, lambda event: event.state is JobState.PARKED)
        assert "needs 1 slots" in parked.text
        own.kill("smo-1")  # also over a restart of who leads
        own.start("smo-1")
        await until(client, later, lambda event: event.state in ENDED)  # it freed what it had: others fit
        record = await client.record(job)
        assert record.state is JobState.PARKED, record.reason
        assert record.reason, "it does not say what for"
        own.start("agent-b")
        record = await done(client, job, await undisturbed_at(client, spec))
        assert record.checkpoint_step is not None
        assert any(line.startswith("parked") for line in record.history)


async def test_a_person_parks_a_job_and_another_takes_its_slots(own: OwnMesh) -> None:
    async with own.client() as client:
        await client.ready()
        spec = tiny_job(
            "by-hand",
            training={"steps": 30, "checkpoint_every": 0, "validation_microbatches": 0},
            parallel={"stages": 2, "replicas": 1},
        )
        spec = padded(spec, pad_ms=20.0)
        job = await client.submit(spec)
        with pytest.raises(Conflict, match="only a parked one can be resumed"):
            await client.ask("job.resume", job=job)
        await client.until_step(job, 8)
        later = await client.submit(tiny_job("meanwhile"))
        with pytest.raises(Conflict, match="has not begun and holds nothing"):
            await client.ask("job.park", job=later)
        await client.ask("job.park", job=job)
        parked = await until(client, job, lambda event: event.state is JobState.PARKED)
        assert parked.text == "parked by rita: asked for at the NATS door"
        own.kill("smo-1")  # nobody resumes it for that there is another one, or room
        own.start("smo-1")
        await until(client, later, lambda event: event.state in ENDED)
        with pytest.raises(Conflict, match="has already ended"):
            await client.ask("job.resume", job=later)
        record = await client.record(job)
        assert (record.state, record.reason) == (JobState.PARKED, parked.text)
        assert record.checkpoint_step == record.step > 8, "of the very step"
        await client.ask("job.resume", job=job)
        on = await until(client, job, lambda event: "resumed from the checkpoint" in event.text)
        assert on.text == f"resumed from the checkpoint of step {record.step}"
        await done(client, job, await undisturbed_at(client, spec))


async def test_a_healthy_job_goes_on_without_room_for_its_other_replica(own: OwnMesh) -> None:
    async with own.client() as client:
        await client.ready()
        spec = tiny_job(
            "healthy",
            training={"steps": 50, "validation_microbatches": 0},
            parallel={"stages": 1, "replicas": 2},
        )
        spec = padded(spec, pad_ms=10.0)
        job = await client.submit(spec)
        await client.until_step(job, 5)
        own.kill("agent-b", signal.SIGKILL)
        said = await until(
            client, job, lambda event: event.state is JobState.RUNNING and "needs 1 slots" in event.text
        )
        step = (await client.record(job)).step
        await client.until_step(job, step + 10)  # it goes on, and says what it lacks
        assert said.state is JobState.RUNNING
        record = await done(client, job, await undisturbed_at(client, spec))
        assert not any(line.startswith("parked") for line in record.history)


async def test_a_node_that_vanishes_before_its_newcomer_joins_costs_the_job_nothing(own: OwnMesh) -> None:
    """A scale-up is ordered from a node agent that stands still, and dies before it has read the order."""
    for name in own.commands.keys() - own.alive().keys():  # killed by the test before
        own.start(name)
    async with own.client() as client:
        await client.ready()
        spec = tiny_job(
            "scaled-up",
            training={"steps": 70, "checkpoint_every": 0, "validation_microbatches": 0},
            parallel={"stages": 1, "replicas": 1},
        )
        spec = padded(spec, pad_ms=10.0)  # it has to last until a node agent has started
        job = await client.submit(spec)
        await client.until_step(job, 5)
        first = await client.bus.bucket(subjects.REGISTRY_RECORD).get(sid=f"{job}-s0-r0")
        assert first is not None
        agent = f"agent-{'b' if first.message.endpoint.cluster == 'a' else 'a'}"
        own.kill(agent, signal.SIGSTOP)
        async with Tap(client.bus, [subjects.START_INSTANCE.wildcard()]) as tap, asyncio.timeout(PATIENCE_S):
            scaling = ScaleJob(job=job, replicas=2, stage=0, user="rita")
            await client.bus.command(subjects.SCALE, scaling, deadline_s=PATIENCE_S)
            async for tapped in tap:
                assert isinstance(tapped.message, InstanceStart)
                assert tapped.message.unit.sid == f"{job}-s0-r1"
                break
        own.kill(agent)
        step = (await client.record(job)).step
        await client.until_step(job, step + 5)
        assert f"{job}-s0-r1" not in client.processes[job], "it had joined before"
        own.start(agent)
        both = await until(
            client,
            job,
            lambda event: (
                event.result is not None and all(event.result.shares.get(f"{job}-s0-r{n}") for n in (0, 1))
            ),
        )
        assert both.result is not None
        assert both.result.step > step, "it works as it was asked to, with the node's return"
        record = await done(client, job, await undisturbed_at(client, spec))
        assert len(client.processes[job][f"{job}-s0-r0"]) == 1
        assert not any(line.startswith("parked") for line in record.history)
