"""Jobs that wait for room, on a real mesh: in order of their submission, and parked ones before all."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import pytest

from bus import subjects
from bus.server.embedded import EmbeddedServer
from schemas.arrays import JobArray
from schemas.gateway_api import MeshStatus
from schemas.job import JobEvent, JobSpec, JobState
from schemas.job_file.parallel import ReplicaRange
from schemas.job_file.queue import ArraySpec, QueueSpec
from schemas.queue import CancelReservation, ReservationSpec, ReservationsQuery, ReserveSlots
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.expected_weights import check_weights_at
from tests.integration.mesh.own_mesh import OTHER_TOKEN, OwnMesh, Witness
from tests.waiting import eventually

SLOTS = 2
"""In each of two clusters."""
LONG = 100_000
"""Steps of a job that is cancelled."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    order = ["--queue-order", "priority", "--queue-cool-down", "0"]
    mesh = OwnMesh(tmp_path_factory.mktemp("own"), [server], slots=SLOTS)
    mesh.commands["smo-1"] = ["run", "orchestrator", *order]
    with mesh.running():
        yield mesh


def of_slots(name: str, slots: int, steps: int = 4) -> JobSpec:
    stages = 2 if slots > 1 else 1
    job = tiny_job(
        name,
        training={"steps": steps, "checkpoint_every": 0, "validation_microbatches": 0},
        parallel={"stages": stages, "replicas": slots // stages},
    )
    return job if steps < LONG else padded(job, pad_ms=150.0)  # while it holds its slots, it computes little


async def ran(client: Witness, job: str) -> float:
    """When its first step was committed."""
    return (await client.until_event(job, lambda event: event.result is not None)).at


async def said(client: Witness, job: str, text: str) -> JobEvent:
    return await client.until_event(job, lambda event: text in event.text)


async def done(client: Witness, job: str) -> list[JobEvent]:
    await check_weights_at(client, job)
    return [event async for event in client.events(job)]


async def test_small_jobs_do_not_overtake_a_large_one(witness: Witness) -> None:
    """Half of the mesh is free all the while: each of them would fit, the large one does not."""
    holder = await witness.submit(of_slots("holds-half", SLOTS, LONG))
    await witness.until_step(holder, 1)
    large = await witness.submit(of_slots("large", 2 * SLOTS))
    await said(witness, large, "needs 4 slots")
    small = [await witness.submit(of_slots(f"small-{number}", 1)) for number in range(3)]
    for job in small:
        await said(witness, job, f"behind {large}")
    assert not [job for job in (large, *small) if (await witness.record(job)).state is not JobState.QUEUED]
    await witness.ask("job.cancel", job=holder)
    over = (await done(witness, large))[-1].at
    for job in small:
        await done(witness, job)
        assert await ran(witness, job) > over, "it began before the large one was done"


async def test_a_parked_job_precedes_one_that_never_started(own: OwnMesh, witness: Witness) -> None:
    """That one was submitted first, and waits for more slots than are free; the parked one fits beside it."""
    own.kill("agent-b")
    await until_nodes(witness, 1)
    never = await witness.submit(of_slots("never-started", 2 * SLOTS))
    await said(witness, never, "slots")  # more than there are: it holds nobody up
    holder = await witness.submit(of_slots("holds-one", 1, LONG))
    # Slow, so that it does not end before it is parked.
    parked = await witness.submit(padded(of_slots("parked", 1, 40), pad_ms=25.0))
    await witness.until_step(holder, 1)
    await witness.until_step(parked, 8)
    await witness.ask("job.park", job=parked)
    await said(witness, parked, "parked by rita")
    own.start("agent-b")
    await until_nodes(witness, 2)  # now the whole mesh has room for it, and three slots are free
    assert (await witness.record(never)).state is JobState.QUEUED
    await witness.ask("job.resume", job=parked)
    over = (await done(witness, parked))[-1].at
    assert (await witness.record(never)).state is JobState.QUEUED
    await witness.ask("job.cancel", job=holder)
    await done(witness, never)
    assert await ran(witness, never) > over


async def test_a_job_parks_for_one_of_higher_priority_and_goes_on_to_the_same_bits(
    own: OwnMesh, witness: Witness
) -> None:
    """Another job, of no priority, waits all the while: who has begun goes on before it."""
    spec = padded(of_slots("low", 2 * SLOTS, 24), pad_ms=25.0)
    low = await witness.submit(spec.model_copy(update={"queue": QueueSpec(notice_s=0.2)}))
    await witness.until_step(low, 3)
    behind = await witness.submit(of_slots("behind", 1))
    await said(witness, behind, "needs 1 slots")
    urgent = await witness.submit(of_slots("high", 2 * SLOTS))
    await said(witness, urgent, f"behind {behind}")
    await witness.ask("job.prioritise", job=urgent, priority=1)  # the next decision ranks all anew
    told = await said(witness, low, f"unless it ends before: parks for {urgent}")
    parked = await witness.until_event(low, lambda event: event.state is JobState.PARKED)
    assert parked.at - told.at >= 0.1, "it was told when it parked"
    over = (await done(witness, urgent))[-1].at
    await done(witness, low)
    assert len([step async for step in steps(witness, low) if step.at < over]) < 24
    assert await ran(witness, behind) > over


async def test_a_job_shrinks_for_others_and_grows_into_what_they_leave(witness: Witness) -> None:
    """It begins beyond what it wants, is at its minimum while both others run, and ends as it began."""
    spec = padded(of_slots("wide", 1, 120), pad_ms=25.0)
    within = ReplicaRange(min=1, want=2, max=4)
    spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"replicas": within})})
    wide = await witness.submit(spec)
    await until_working(witness, wide, 4)
    guest = await witness.submit(padded(of_slots("guest", 1, 12), pad_ms=25.0))
    second = await witness.submit(padded(of_slots("second", 2, 12), pad_ms=25.0))
    await said(witness, wide, f"makes room for {second}")
    await until_working(witness, wide, 1)
    await done(witness, guest)
    await done(witness, second)
    seen = await done(witness, wide)
    assert any("grows to 4 replicas into idle slots" in event.text for event in seen)
    last = [event.result for event in seen if event.result is not None][-1]
    assert len(last.shares) == 4, last.shares


async def test_an_array_keeps_its_limit_over_a_new_leader_and_others_wait_for_all_of_it(
    own: OwnMesh, witness: Witness
) -> None:
    """All four slots are free; the orchestrator that took the array dies while its first job runs."""
    seeds = [{"training.seed": seed} for seed in (1, 2, 1)]
    spec = padded(of_slots("seeds", 1, 8), pad_ms=25.0)
    spec = spec.model_copy(update={"array": ArraySpec(members=tuple(seeds), limit=1)})
    array = await witness.ask("job.submit", spec=spec)
    assert isinstance(array, JobArray)
    after = of_slots("after", 1).model_copy(update={"queue": QueueSpec(after=(array.array,))})
    last = await witness.submit(after)
    await said(witness, last, f"starts after {array.array} is done")
    await said(witness, array.members[1].job, f"array {array.array} has 1 running, its limit")
    await witness.until_step(array.members[0].job, 1)
    own.kill("smo-1")
    own.start("smo-1")
    over = 0.0
    for member in array.members:
        await done(witness, member.job)
        taken = [step.at async for step in steps(witness, member.job)]
        assert min(taken) > over, "two ran at a time"
        over = max(taken)
    await done(witness, last)
    assert await ran(witness, last) > over
    found = [(await witness.record(member.job)).weights for member in array.members]
    first, other, again = (None if weights is None else weights.sha256 for weights in found)
    assert first == again != other


async def test_a_reservation_outlives_the_leader_that_promised_it(own: OwnMesh, witness: Witness) -> None:
    """The whole mesh is ana's: rita's job goes on waiting under the next leader, hers starts at once."""
    now = time.time()
    spec = ReservationSpec(name="anas", slots=2 * SLOTS, start_at=now - 1, end_at=now + 3600, user="ana")
    await witness.bus.command(subjects.RESERVE_SLOTS, ReserveSlots(spec=spec, by="olga"))
    stranger = await witness.submit(of_slots("stranger", 1))
    await said(witness, stranger, "needs 1 slots, 0 of 4 free")
    before = await witness.leader()
    assert before.pid == own.kill("smo-1")
    own.start("smo-1")
    await witness.until_next_term(before)
    promised = await witness.bus.command(subjects.RESERVATIONS_QUERY, ReservationsQuery())
    assert [(each.spec, each.by) for each in promised.reservations] == [(spec, "olga")]
    entitled = await witness.submit(of_slots("entitled", 2 * SLOTS), token=OTHER_TOKEN)
    over = (await done(witness, entitled))[-1].at
    record = await witness.record(stranger)
    assert record.state is JobState.QUEUED, record.reason
    assert record.user == "rita"
    assert (await witness.record(entitled)).user == "ana"
    await witness.bus.command(subjects.CANCEL_RESERVATION, CancelReservation(name="anas", by="olga"))
    await done(witness, stranger)
    assert await ran(witness, stranger) > over


async def until_working(client: Witness, job: str, replicas: int) -> None:
    """Returns once a step was computed by so many."""
    await client.until_event(
        job, lambda event: event.result is not None and len(event.result.shares) == replicas
    )


async def steps(client: Witness, job: str) -> AsyncIterator[JobEvent]:
    async for event in client.events(job):
        if event.result is not None:
            yield event


async def until_nodes(client: Witness, count: int) -> None:
    async def warm() -> bool:
        status = await client.ask("mesh.read")
        assert isinstance(status, MeshStatus)
        return len(status.nodes) == count and all(node.warm for node in status.nodes)

    await eventually(warm, every_s=0.1)
