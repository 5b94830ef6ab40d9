"""Joins and leaves in mid-run, and a standby that takes over a stage: the weights do not change by it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from dmsc.client.async_client import AsyncClient
from entities.authorizer.access.access_policy import default_text
from schemas.errors import OverQuota
from schemas.job import JobEvent, JobSpec, JobState
from schemas.job_file.queue import QueueSpec
from tests.integration.dmsc.command_line import wait_for
from tests.integration.mesh.conftest import Mesh, padded, running_mesh, tiny_job, until_step
from tests.integration.mesh.expected_weights import check_weights

MICROBATCHES = 4


def shape(name: str, *, steps: int, pad_ms: float, **parallel: object) -> JobSpec:
    """Padded, so that a step takes its time, though not the processor's, and a newcomer is there before the
    job ends."""
    job = tiny_job(
        name,
        model={"args": {"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}},
        training={"steps": steps, "microbatches": MICROBATCHES, "seed": 5},
        parallel={"stages": 2, "replicas": 1, **parallel},
    )
    return padded(job, pad_ms)


def check(mesh: Mesh, job: str, seen: list[JobEvent]) -> None:
    record = check_weights(mesh.client, job)
    results = [event.result for event in seen if event.result is not None]
    assert [result.step for result in results] == list(range(record.spec.training.steps))
    assert {sum(result.shares.values()) for result in results} == {MICROBATCHES * record.spec.parallel.stages}


def test_one_replica_becomes_four_and_then_two(mesh: Mesh) -> None:
    job = mesh.client.submit(shape("scaled", steps=22, pad_ms=24.0)).job
    seen: list[JobEvent] = []
    asked: list[str] = []
    most = 0
    for event in mesh.client.events(job):
        seen.append(event)
        if event.result is None:
            continue
        working = sum(sid.startswith(f"{job}-s0") for sid in event.result.shares)
        most = max(most, working)
        if not asked and event.result.step == 1:
            asked.append(mesh.client.scale(job, 4, stage=0))
        elif len(asked) == 1 and working == 4:
            asked.append(mesh.client.scale(job, 2, stage=0))
    assert len(asked) == 2, asked
    assert "will join" in asked[0]
    assert asked[1] == f"{job}-s0-r2, {job}-s0-r3 will leave"
    assert most == 4
    last = [event.result for event in seen if event.result is not None][-1]
    assert last is not None
    assert sum(sid.startswith(f"{job}-s0") for sid in last.shares) == 2
    check(mesh, job, seen)


def test_a_parked_job_goes_on_in_other_shapes_to_the_same_bits(mesh: Mesh) -> None:
    """Two stages, then one of three replicas, then three; each time a checkpoint of the very step."""
    job = mesh.client.submit(shape("reshaped", steps=36, pad_ms=16.0, standbys=0)).job
    until_step(mesh.client, job, 3)
    mesh.client.scale(job, 1)  # what a person has set is kept while the job has no instances
    refused = mesh.dmsc("resume", job, "--stages", "1")
    assert refused.returncode != 0
    assert "`dmsc park` it first" in refused.stderr
    mesh.printed("park", job)
    until_parked(mesh, job)
    refused = mesh.dmsc("resume", job, "--stages", "90")
    assert "90 stages, but the model of job" in refused.stderr
    for stages, replicas, step in ((1, 3, 9), (3, 1, 15)):
        until_parked(mesh, job)
        mesh.printed("resume", job, "--stages", str(stages), "--replicas", str(replicas))
        wait_for(lambda shape=[replicas] * stages: replicas_in_graph(mesh, job) == shape, "the resumed shape")
        until_step(mesh.client, job, step)
        if stages == 1:
            mesh.printed("park", job)
    check_weights(mesh.client, job)


def replicas_in_graph(mesh: Mesh, job: str) -> list[int]:
    """Of each stage, as the job's plan in force has them."""
    graph = mesh.client.job(job).graph
    return [] if graph is None else [len(graph.stage(number)) for number in range(len(graph.cuts))]


def until_parked(mesh: Mesh, job: str) -> None:
    """Returns once it waits at a checkpoint."""
    for event in mesh.client.events(job):
        if event.state is JobState.PARKED and mesh.client.job(job).state is JobState.PARKED:
            return


def test_slots_that_are_reserved_stay_empty_for_their_user(mesh: Mesh) -> None:
    outside = shape("outside", steps=4, pad_ms=0.0, stages=1)
    check_weights(mesh.client, mesh.client.submit(outside).job)  # so all nodes have joined
    slots = mesh.client.queue().slots
    mesh.printed("reserve", str(slots), "--until", "1h", "--user", "rita", "--name", "night")
    try:
        assert "night" in mesh.printed("queue", "reservations")
        refused = mesh.dmsc("reserve", "1", "--until", "30m", "--name", "late")
        assert refused.returncode != 0
        assert "reservation late: 1 of its 1 slots are kept for night at the same time" in refused.stderr
        job = mesh.client.submit(outside.model_copy(update={"queue": QueueSpec(hold=True)})).job
        for event in mesh.client.events(job):
            if "queue.hold" in event.text:
                mesh.printed("resume", job)
            if "needs 1 slots" in event.text:
                break
        place = mesh.client.queue(job).jobs[0]
        assert (place.cause, place.reason.rpartition(", ")[2]) == (
            "reserved",
            f"{slots} kept by reservation night",
        )
        assert f"{job} has priority 3" in mesh.printed("queue", "prioritise", job, "3")
        assert mesh.client.queue(job).jobs[0].priority == 3
        assert job in mesh.printed("queue")
        assert f"{job} (outside) is 1 of 1, needs 1 slots" in mesh.printed("queue", "explain", job)
        assert "1 more would have all start" in mesh.printed("queue", "capacity")
    finally:
        mesh.printed("queue", "release", "night")
    check_weights(mesh.client, job)


QUOTA = """
quotas:
  - {name: narrow, roles: [researcher], slots: 3}
"""


async def test_orders_to_scale_at_once_are_counted_one_after_the_other(tmp_path: Path) -> None:
    access = tmp_path / "access.yaml"
    access.write_text(default_text().partition("\nquotas:")[0] + QUOTA)
    options = ("--cluster", "a", "--slots", "8", "--access-file", str(access))
    with running_mesh(tmp_path / "state", *options) as mesh:
        async with AsyncClient(state=mesh.state) as admin:
            token = (await admin.add_user("ruth", "researcher")).token or ""
        async with AsyncClient(state=mesh.state, token=token) as ruth:
            record = await ruth.submit(shape("narrow", steps=1_000, pad_ms=24.0))
            async for event in ruth.events(record.job):
                if event.result is not None:
                    break
            asked = (
                ruth.scale(record.job, 2, stage=0),
                ruth.scale(record.job, 2, stage=1),
                ruth.submit(shape("one-more", steps=20, pad_ms=0.0, stages=1)),
            )
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, OverQuota)]
            assert len(refused) == 2, answers
            assert all("at most 3 (quota narrow)" in str(one) for one in refused)
            with pytest.raises(OverQuota):
                await ruth.scale(record.job, 3)
            assert (await ruth.whoami()).use.slots <= 3
            await ruth.cancel(record.job)


def test_a_standby_keeps_up_and_takes_the_stage_over(mesh: Mesh) -> None:
    job = mesh.client.submit(shape("standby", steps=10, pad_ms=8.0, standbys=(0, 1))).job
    seen: list[JobEvent] = []
    killed = 0
    for event in mesh.client.events(job):
        seen.append(event)
        if event.result is None:
            continue
        if event.result.step == 2:
            assert event.result.shares[f"{job}-s1-r1"] == 0, "a standby has no work"
            killed = mesh.instance(f"{job}-s1-r0").endpoint.pid
            os.kill(killed, signal.SIGKILL)
    assert killed, "the fault never fired"
    check(mesh, job, seen)
    assert not [event.text for event in seen if "all back to step" in event.text], "nobody rolled back"
    worked = [event.result.step for event in seen if event.result and event.result.shares.get(f"{job}-s1-r1")]
    assert worked, "the standby never worked"
    told = [event.text for event in seen if event.kind == "recovery"]
    assert f"stage 1: standby {job}-s1-r1 takes over, no other replica lives" in told
    crews = [event.instances for event in seen if event.instances is not None]
    assert {view.sid for crew in crews for view in crew if view.standby} == {f"{job}-s1-r1"}
