"""A mesh without room, with real processes: a healthy job goes on; one that has nothing left, or that a
person wants to wait, is parked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from bus.tap.live_tap import Tap
from schemas.changes import ChangeState
from schemas.cluster import InstanceStart
from schemas.errors import Conflict
from schemas.gateway_api import ScaleJob
from schemas.job import ENDED, JobSpec, JobState
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.expected_weights import check_weights_at, undisturbed_at
from tests.integration.mesh.own_mesh import OwnMesh, Witness
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """One slot in each of two clusters."""
    with OwnMesh(tmp_path_factory.mktemp("own"), [server], slots=1).running() as mesh:
        yield mesh


def lasting(
    name: str, steps: int, stages: int, replicas: int, *, pad_ms: float = 10.0, **more: Any
) -> JobSpec:
    training = {"steps": steps, "validation_microbatches": 0, **more.pop("training", {})}
    job = tiny_job(name, training=training, parallel={"stages": stages, "replicas": replicas}, **more)
    return padded(job, pad_ms)


async def test_a_job_with_nothing_left_is_parked_and_goes_on_when_there_is_room(
    own: OwnMesh, witness: Witness
) -> None:
    every = {"checkpoint_every": 3}
    by_hand = {"mode": "off"}  # else it goes on with fewer stages
    spec = lasting("parks", 22, stages=2, replicas=1, pad_ms=25.0, training=every, automation=by_hand)
    job = await witness.submit(spec)
    later = await witness.submit(tiny_job("waits"))
    behind = await witness.until_event(
        later, lambda event: event.state is JobState.QUEUED and bool(event.text)
    )
    assert "submitted" in behind.text or "slots" in behind.text
    await witness.until_event(job, lambda event: event.result is not None and event.result.step >= 7)
    own.kill("agent-b")
    parked = await witness.until_event(job, lambda event: event.state is JobState.PARKED)
    assert "needs 1 slots" in parked.text
    own.kill("smo-1")  # also over a restart of who leads
    own.start("smo-1")
    await witness.until_event(later, lambda event: event.state in ENDED)  # it freed what it had: others fit
    record = await witness.record(job)
    assert record.state is JobState.PARKED, record.reason
    assert record.reason, "it does not say what for"
    own.start("agent-b")
    record = await check_weights_at(witness, job)
    assert record.checkpoint_step is not None
    assert any(line.startswith("parked") for line in record.history)


async def test_a_loss_without_room_leaves_fewer_stages_until_there_is_room(
    own: OwnMesh, witness: Witness
) -> None:
    own.start("agent-third", ["join", "--cluster", "a", "--node", "third", "--slots", "1"])
    model = {"args": {"layers": 6, "width": 32, "heads": 2, "context": 32}}
    training = {"microbatches": 8, "checkpoint_every": 3}
    spec = lasting("fewer", 50, stages=3, replicas=1, pad_ms=8.0, training=training, model=model)
    job = await witness.submit(spec)
    await witness.until_event(job, lambda event: event.result is not None and event.result.step >= 4)
    own.kill("agent-third")
    fewer = await witness.until_event(job, lambda event: "3 → 2 stages" in event.text)
    assert "a step is expected to take" in fewer.text
    await witness.until_event(job, lambda event: event.at > fewer.at and event.result is not None)
    record = await witness.record(job)
    assert record.graph is not None
    assert len(record.graph.cuts) == record.spec.parallel.stages == 2
    own.start("agent-third")
    back = await witness.until_event(
        job, lambda event: event.change is not None and event.change.what == "2 → 3 stages"
    )
    assert back.change is not None
    assert back.change.forecast is not None
    record = await witness.ended(job)
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    unpadded = lasting("same", 50, stages=3, replicas=1, pad_ms=0.0, training=training, model=model)
    assert record.weights.sha256 == await undisturbed_at(witness, unpadded)
    assert record.spec.parallel.stages == 3
    assert record.former_shape is None
    (change,) = (each for each in record.changes if each.what == "2 → 3 stages")
    assert change.state in (ChangeState.BETTER, ChangeState.NO_BETTER), change
    assert change.cost_s, "what it cost is measured"
    own.retire("agent-third")


async def test_a_person_parks_a_job_and_another_takes_its_slots(own: OwnMesh, witness: Witness) -> None:
    job = await witness.submit(lasting("by-hand", 15, stages=2, replicas=1, pad_ms=40.0))
    with pytest.raises(Conflict, match="only a parked one can be resumed"):
        await witness.ask("job.resume", job=job)
    await witness.until_step(job, 4)
    later = await witness.submit(tiny_job("meanwhile"))
    await witness.ask("job.park", job=later)  # it is held in the queue
    assert (await witness.record(later)).held == "parked by rita: asked for at the NATS door"
    await witness.ask("job.resume", job=later)
    await witness.ask("job.park", job=job)
    parked = await witness.until_event(job, lambda event: event.state is JobState.PARKED)
    assert parked.text == "parked by rita: asked for at the NATS door"
    own.kill("smo-1")  # nobody resumes it for that there is another one, or room
    own.start("smo-1")
    await witness.until_event(later, lambda event: event.state in ENDED)
    with pytest.raises(Conflict, match="has already ended"):
        await witness.ask("job.resume", job=later)
    record = await witness.record(job)
    assert (record.state, record.reason) == (JobState.PARKED, parked.text)
    assert record.checkpoint_step == record.step > 4, "of the very step"
    await witness.ask("job.resume", job=job)
    on = await witness.until_event(job, lambda event: "resumed from the checkpoint" in event.text)
    assert on.text == f"resumed from the checkpoint of step {record.step}"
    await check_weights_at(witness, job)


async def test_a_healthy_job_goes_on_without_room_for_its_other_replica(
    own: OwnMesh, witness: Witness
) -> None:
    job = await witness.submit(lasting("healthy", 25, stages=1, replicas=2, pad_ms=20.0))
    await witness.until_step(job, 3)
    own.kill("agent-b", signal.SIGKILL)
    said = await witness.until_event(
        job, lambda event: event.state is JobState.RUNNING and "needs 1 slots" in event.text
    )
    step = (await witness.record(job)).step
    await witness.until_step(job, step + 4)  # it goes on, and says what it lacks
    assert said.state is JobState.RUNNING
    record = await check_weights_at(witness, job)
    assert not any(line.startswith("parked") for line in record.history)


async def test_a_node_that_vanishes_before_its_newcomer_joins_costs_the_job_nothing(
    own: OwnMesh, witness: Witness
) -> None:
    """A scale-up is ordered from a node agent that stands still, and dies before it has read the order."""
    # it has to last until a node agent has started
    job = await witness.submit(lasting("scaled-up", 35, stages=1, replicas=1, pad_ms=20.0))
    await witness.until_step(job, 3)
    first = await witness.bus.bucket(subjects.REGISTRY_RECORD).get(sid=f"{job}-s0-r0")
    assert first is not None
    agent = f"agent-{'b' if first.message.endpoint.cluster == 'a' else 'a'}"
    own.kill(agent, signal.SIGSTOP)
    async with Tap(witness.bus, [subjects.START_INSTANCE.wildcard()]) as tap, asyncio.timeout(PATIENCE_S):
        scaling = ScaleJob(job=job, replicas=2, stage=0, user="rita")
        await witness.bus.command(subjects.SCALE, scaling, deadline_s=PATIENCE_S)
        async for tapped in tap:
            assert isinstance(tapped.message, InstanceStart)
            assert tapped.message.unit.sid == f"{job}-s0-r1"
            break
    own.kill(agent)
    step = (await witness.record(job)).step
    await witness.until_step(job, step + 3)
    assert f"{job}-s0-r1" not in witness.processes[job], "it had joined before"
    own.start(agent)
    both = await witness.until_event(
        job,
        lambda event: (
            event.result is not None and all(event.result.shares.get(f"{job}-s0-r{n}") for n in (0, 1))
        ),
    )
    assert both.result is not None
    assert both.result.step > step, "it works as it was asked to, with the node's return"
    record = await check_weights_at(witness, job)
    assert len(witness.processes[job][f"{job}-s0-r0"]) == 1
    assert not any(line.startswith("parked") for line in record.history)
