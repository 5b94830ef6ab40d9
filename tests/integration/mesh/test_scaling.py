"""Joins and leaves in mid-run, and a standby that takes over a stage: the weights do not change by it."""

from __future__ import annotations

import os
import signal

import pytest

from schemas.job import JobEvent, JobSpec, JobState
from tests.integration.mesh.conftest import Mesh, tiny_job
from tests.integration.mesh.test_faults import pid_of

STEPS = 60


def shape(name: str, *, pad_ms: float = 4.0, **parallel: object) -> JobSpec:
    """Padded, so that a step lasts some 100 ms and a newcomer is there before the job ends."""
    sizes = {"layers": 3, "width": 32, "heads": 2, "context": 32, "dropout": 0.1, "pad_ms": pad_ms}
    return tiny_job(
        name,
        model={"factory": "workers.models.padded:padded_gpt", "args": sizes},
        training={"steps": STEPS, "microbatches": 6, "microbatch_samples": 2, "seed": 5},
        parallel={"stages": 2, "replicas": 1, **parallel},
    )


def check(mesh: Mesh, job: str, seen: list[JobEvent]) -> str:
    record = mesh.client.wait(job, timeout_s=90)
    assert record.state is JobState.DONE, record.reason
    results = [event.result for event in seen if event.result is not None]
    assert [result.step for result in results] == list(range(STEPS))
    assert {sum(result.shares.values()) for result in results} == {6 * record.spec.parallel.stages}
    assert record.weights is not None
    return record.weights.sha256


@pytest.fixture(scope="module")
def undisturbed(mesh: Mesh) -> str:
    job = mesh.client.submit(shape("undisturbed-scaling", pad_ms=0.0, stages=1)).job
    return check(mesh, job, list(mesh.client.events(job)))


@pytest.mark.timeout(180)
def test_one_replica_becomes_four_and_then_two(mesh: Mesh, undisturbed: str) -> None:
    spec = shape("scaled")
    job = mesh.client.submit(spec).job
    seen: list[JobEvent] = []
    asked: list[str] = []
    most = 0
    for event in mesh.client.events(job):
        seen.append(event)
        if event.result is None:
            continue
        working = sum(sid.startswith(f"{job}-s0") for sid in event.result.shares)
        most = max(most, working)
        if not asked and event.result.step == 3:
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
    assert check(mesh, job, seen) == undisturbed


@pytest.mark.timeout(120)
def test_a_standby_keeps_up_and_takes_the_stage_over(mesh: Mesh, undisturbed: str) -> None:
    job = mesh.client.submit(shape("standby", standbys=(0, 1))).job
    seen: list[JobEvent] = []
    killed = 0
    for event in mesh.client.events(job):
        seen.append(event)
        if event.result is None:
            continue
        if event.result.step == 5:
            assert event.result.shares[f"{job}-s1-r1"] == 0, "a standby has no work"
            killed = pid_of(mesh, f"{job}-s1-r0")
            os.kill(killed, signal.SIGKILL)
    assert killed, "the fault never fired"
    assert check(mesh, job, seen) == undisturbed
    assert not [event.text for event in seen if "all back to step" in event.text], "nobody rolled back"
    worked = [event.result.step for event in seen if event.result and event.result.shares.get(f"{job}-s1-r1")]
    assert worked, "the standby never worked"
    told = [event.text for event in seen if event.kind == "recovery"]
    assert f"stage 1: standby {job}-s1-r1 takes over, no other replica lives" in told
    crews = [event.instances for event in seen if event.instances is not None]
    assert {view.sid for crew in crews for view in crew if view.standby} == {f"{job}-s1-r1"}
