"""The fault queue (reference 3, exception task queue): what failed, why, how often, and what became of it.

A microbatch that fails wherever it runs is quarantined; the job stops, or leaves its step out, by policy.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from schemas.envelope import EntityKind
from schemas.fault import FAULT_OVER, FaultRecord, FaultState
from schemas.job import JobEvent, JobRecord, JobState
from schemas.registry import InstanceState
from tests.integration.dmsc.command_line import running, wait_for
from tests.integration.mesh.conftest import Mesh, done
from tests.integration.mesh.counter import Counter, Meetings, serving
from tests.integration.mesh.expected_weights import undisturbed
from tests.integration.mesh.user_jobs import MICROBATCHES, held_job, hold, poison, user_job
from tests.patience import PATIENCE_S

SKIPPING = {"steps": 5, "on_bad_microbatch": "skip"}


def run(
    mesh: Mesh, source: Path, poison: list[int], reaction: str, **sections: Any
) -> tuple[JobRecord, list[JobEvent]]:
    """A job of `troubled:allergic`, to its end."""
    model = {"args": {"poison": poison, "reaction": reaction}}
    job = mesh.client.submit(user_job("allergic", source, model=model, **sections)).job
    seen = list(mesh.client.events(job))
    return mesh.client.wait(job, timeout_s=PATIENCE_S), seen


@pytest.fixture(scope="module")
def sound(mesh: Mesh, source: Path) -> str:
    """SHA-256 of the weights with every step run."""
    record, _ = run(mesh, source, [-1], "none", training={"steps": 5})
    assert record.weights is not None
    return record.weights.sha256


def committed(seen: list[JobEvent]) -> list[int]:
    """Steps, each once: without a replica, a lost instance means going back to the seed."""
    return sorted({event.result.step for event in seen if event.result is not None})


def skipped(seen: list[JobEvent]) -> list[JobEvent]:
    return [event for event in seen if event.kind == "skipped"]


def over(mesh: Mesh, job: str) -> list[FaultRecord]:
    """The job's faults once the queue has ended all of them."""

    def ended() -> bool:
        found = mesh.client.faults(job)
        return bool(found) and all(fault.state in FAULT_OVER for fault in found)

    wait_for(ended, lambda: str(mesh.client.faults(job)))
    return mesh.client.faults(job)


def bad_microbatch(mesh: Mesh, job: str) -> FaultRecord:
    """The one fault of that kind, once the queue has ended all of them."""
    (fault,) = [fault for fault in over(mesh, job) if fault.kind == "microbatch"]
    return fault


# --- the queue ------------------------------------------------------------------------------------------
def test_a_killed_instance_is_in_the_queue_from_report_to_resolution(
    mesh: Mesh, source: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = hold(mesh.client, held_job(source, gate, parallel={"replicas": 2}), gate)
    with running("faults", job, "--follow", "--state", str(mesh.state), cwd=tmp_path) as following:
        victim, data = mesh.instance(f"{job}-s0-r1"), mesh.instance(f"{job}-data-r0")
        for record, role in ((victim, "stage=0 replica=1"), (data, "data replica=0")):
            shown = " ".join(psutil.Process(record.endpoint.pid).cmdline())
            assert shown.startswith(f"dmsc instance job={job} {role} incarnation={record.incarnation} log=/")
        os.kill(victim.endpoint.pid, signal.SIGKILL)
        gate.unlink()
        done(mesh.client, job)
        of_victim = [fault for fault in over(mesh, job) if fault.task.sid == f"{job}-s0-r1"]
        (fault,) = [fault for fault in of_victim if fault.kind == "instance"]
        assert fault.state is FaultState.HANDLED
        assert fault.verdict == "structural"
        assert (fault.task.job, fault.task.stage) == (job, 0)
        assert fault.task.step is not None
        assert (fault.attempts, fault.limit) == (1, 6)
        assert any("SIGKILL" in line for line in (*fault.log, fault.reason))
        assert "committed" in fault.action
        assert fault.opened_at <= fault.changed_at
        following.until(lambda text: fault.id in text and "handled" in text)
    states = [line.split()[2] for line in following.output.splitlines() if fault.id in line]
    assert states[0] == "open"
    assert states[-1] == "handled"
    assert "retrying" in states

    assert fault.id in {one["id"] for one in json.loads(mesh.printed("faults", job, "--json"))}
    table = mesh.printed("faults").splitlines()
    assert any(fault.id in line and "handled" in line for line in table)


def test_the_queue_is_read_only_by_who_may(mesh: Mesh) -> None:
    url = next(
        one.endpoint.address
        for one in mesh.client.mesh().services
        if one.kind is EntityKind.GATEWAY and one.state is InstanceState.ACTIVE
    )
    for path in ("/v1/faults", "/v1/faults/events"):
        assert httpx.get(f"{url}{path}").status_code == 401
    headers = {"Authorization": f"Bearer {mesh.token}"}
    assert httpx.get(f"{url}/v1/faults", params={"job": "no job"}, headers=headers).status_code == 404
    assert httpx.get(f"{url}/v1/faults", params={"job": "nobody"}, headers=headers).json()["faults"] == []


# --- quarantine -----------------------------------------------------------------------------------------
def test_a_bad_microbatch_stops_the_job_and_the_queue_says_why(mesh: Mesh, source: Path) -> None:
    record, _ = run(mesh, source, poison(source, 1), "raise", training={"steps": 3})
    assert record.state is JobState.FAILED
    fault = bad_microbatch(mesh, record.job)
    assert fault.state is FaultState.GIVEN_UP
    assert (fault.task.step, fault.task.microbatch, fault.task.stage) == (1, 1, 0)
    assert fault.attempts == 2 > fault.limit
    assert any("LookupError: no such word (troubled.py:" in line for line in fault.log)
    assert any("Traceback" in line for line in fault.log), "the instance's own log is in the record"
    assert record.reason in fault.action


def test_a_step_with_a_bad_microbatch_is_left_out_by_policy(mesh: Mesh, source: Path, sound: str) -> None:
    """The same weights, whatever was bad and whoever did the work; and other ones than if it had been run."""
    digests = set()
    for reaction, stages, replicas in (
        ("raise", 1, 1),
        ("raise", 2, 2),
        ("nan", 2, 1),
        ("raise in backward", 1, 2),
    ):
        parallel = {"stages": stages, "replicas": replicas}
        record, seen = run(mesh, source, poison(source, 2), reaction, training=SKIPPING, parallel=parallel)
        assert record.state is JobState.DONE, record.reason
        assert record.step == 5
        assert record.weights is not None
        digests.add(record.weights.sha256)
        assert len(digests) == 1, (reaction, stages, replicas)
        (event,) = skipped(seen)
        assert event.skipped_step == 2
        assert "step 2, microbatch 1" in event.text
        assert committed(seen) == [0, 1, 3, 4]
        assert 1 <= record.recoveries <= 4
        fault = bad_microbatch(mesh, record.job)
        assert fault.state is FaultState.HANDLED
        assert "step 2 left out" in fault.action
    assert sound not in digests


def test_a_third_replica_takes_the_others_past_a_bad_step(mesh: Mesh, source: Path) -> None:
    """Two of three fail at it; while the third is still at it the step is given up, without a roll-back."""
    with serving(Counter()) as met:
        reaction = f"raise twice: {met.address}"
        parallel = {"replicas": 3}
        record, seen = run(mesh, source, poison(source, 2), reaction, training=SKIPPING, parallel=parallel)
    assert met.met in (2, 3), "the fault never fired"  # the third may not get to it
    assert record.state is JobState.DONE, record.reason
    assert [event.skipped_step for event in skipped(seen)] == [2]
    assert [event.result.step for event in seen if event.result is not None] == [0, 1, 3, 4]
    assert JobState.RECOVERING not in {event.state for event in seen}
    assert record.recoveries == 2
    fault = bad_microbatch(mesh, record.job)
    assert (fault.state, fault.attempts) == (FaultState.HANDLED, 2)


def test_a_fault_of_the_machine_is_not_the_microbatchs(mesh: Mesh, source: Path) -> None:
    """Once only, on one instance: the step is done again and counts, with `skip` as with `stop`."""
    with serving(Counter()) as met:
        reaction, training = f"raise once: {met.address}", SKIPPING | {"steps": 4}
        record, seen = run(mesh, source, poison(source, 2), reaction, training=training)
    assert met.met, "the fault never fired"
    assert record.state is JobState.DONE, record.reason
    assert committed(seen) == [0, 1, 2, 3]
    assert not skipped(seen)
    fault = bad_microbatch(mesh, record.job)
    assert (fault.state, fault.attempts) == (FaultState.HANDLED, 1)
    assert "step 2 committed" in fault.action


def test_a_model_that_can_compute_nothing_never_loops(mesh: Mesh, source: Path) -> None:
    training = SKIPPING | {"steps": 100, "microbatches": MICROBATCHES}
    record, seen = run(mesh, source, poison(source, 0, 0), "raise at all others", training=training)
    assert record.state is JobState.FAILED
    assert record.reason.startswith("steps 0 to 2 can't be computed: it is not their data alone")
    assert {event.skipped_step for event in skipped(seen)} == {0, 1}
    assert len(seen) < 200


# --- the budget -----------------------------------------------------------------------------------------
def test_code_that_fails_here_and_there_parks_its_job_until_a_person_resumes_it(
    mesh: Mesh, source: Path
) -> None:
    """Four microbatches, each of which fails once: no step can be blamed (ADR-0059)."""
    budget, training = {"max_recoveries": 2}, {"steps": 4, "microbatches": 1}
    with serving(Meetings()) as meetings:
        args = {"meetings": meetings.address}
        spec = user_job("shy", source, model={"args": args}, training=training, recovery=budget)
        job = mesh.client.submit(spec).job
        parked = next(event for event in mesh.client.events(job) if event.state is JobState.PARKED)
        assert "the job's own code failed 3 times within" in parked.text
        assert "recovery.max_recoveries is 2 within 3600 s; the last time" in parked.text
        assert "LookupError: we have not met (troubled.py:" in parked.text
        assert f"`dmsc resume {job}`" in parked.text
        record = mesh.client.job(job)
        assert (record.state, record.held) == (JobState.PARKED, parked.text)
        mesh.client.resume(job)
        record = done(mesh.client, job)
    assert len(meetings.seen) == 4
    assert record.weights is not None
    trusting = spec.model_copy(update={"model": spec.model.model_copy(update={"args": {"meetings": ""}})})
    assert record.weights.sha256 == undisturbed(mesh.client, trusting)
