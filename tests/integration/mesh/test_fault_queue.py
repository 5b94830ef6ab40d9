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
import pytest

from schemas.envelope import EntityKind
from schemas.fault import FAULT_OVER, FaultRecord, FaultState
from schemas.job import JobEvent, JobRecord, JobState
from schemas.registry import InstanceState
from tests.integration.dmsc.command_line import dmsc, running, wait_for
from tests.integration.mesh.conftest import Mesh
from tests.integration.mesh.counter import counter
from tests.integration.mesh.user_jobs import HELD_STEPS, MICROBATCHES, hold, poison, user_job, words
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words(tmp_path_factory.mktemp("data"))


def run(mesh: Mesh, factory: str, source: Path, **sections: Any) -> tuple[JobRecord, list[JobEvent]]:
    job = mesh.client.submit(user_job(factory, source, **sections)).job
    seen = list(mesh.client.events(job))
    return mesh.client.wait(job, timeout_s=PATIENCE_S), seen


@pytest.fixture(scope="module")
def sound(mesh: Mesh, source: Path) -> str:
    """SHA-256 of the weights with every step run."""
    record, _ = run(
        mesh, "allergic", source, model={"args": {"poison": [-1], "reaction": "none"}}, training={"steps": 5}
    )
    assert record.weights is not None
    return record.weights.sha256


def committed(seen: list[JobEvent]) -> list[int]:
    """Steps, each once: without a replica, a lost instance means going back to the seed."""
    return sorted({event.result.step for event in seen if event.result is not None})


def over(mesh: Mesh, job: str) -> list[FaultRecord]:
    """The job's faults once the queue has ended all of them."""

    def ended() -> bool:
        found = mesh.client.faults(job)
        return bool(found) and all(fault.state in FAULT_OVER for fault in found)

    wait_for(ended, lambda: str(mesh.client.faults(job)))
    return mesh.client.faults(job)


# --- the queue ------------------------------------------------------------------------------------------
def test_a_killed_instance_is_in_the_queue_from_report_to_resolution(
    mesh: Mesh, source: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    args = {"gate": str(gate)}
    spec = user_job(
        "held", source, model={"args": args}, training={"steps": HELD_STEPS}, parallel={"replicas": 2}
    )
    job = hold(mesh.client, spec, gate)
    state = ("--state", str(mesh.state))
    with running("faults", job, "--follow", *state, cwd=tmp_path) as following:
        (record,) = [one for one in mesh.client.mesh().services if one.sid == f"{job}-s0-r1"]
        assert record.kind is EntityKind.INSTANCE
        os.kill(record.endpoint.pid, signal.SIGKILL)
        gate.unlink()
        assert mesh.client.wait(job, timeout_s=PATIENCE_S).state is JobState.DONE
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

    told = dmsc("faults", job, "--json", *state, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert fault.id in {one["id"] for one in json.loads(told.stdout)}
    table = dmsc("faults", *state, cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert any(fault.id in line and "handled" in line for line in table.stdout.splitlines())


def test_the_queue_is_read_only_by_who_may(mesh: Mesh) -> None:
    url = next(
        one.endpoint.address
        for one in mesh.client.mesh().services
        if one.kind is EntityKind.GATEWAY and one.state is InstanceState.ACTIVE
    )
    for path in ("/v1/faults", "/v1/faults/events"):
        assert httpx.get(f"{url}{path}").status_code == 401
    headers = {"Authorization": f"Bearer {(mesh.state / 'token').read_text().strip()}"}
    assert httpx.get(f"{url}/v1/faults", params={"job": "no job"}, headers=headers).status_code == 404
    assert httpx.get(f"{url}/v1/faults", params={"job": "nobody"}, headers=headers).json()["faults"] == []


# --- quarantine -----------------------------------------------------------------------------------------
def test_a_bad_microbatch_stops_the_job_and_the_queue_says_why(mesh: Mesh, source: Path) -> None:
    args = {"poison": poison(source, 1), "reaction": "raise"}
    record, _ = run(mesh, "allergic", source, model={"args": args}, training={"steps": 3})
    assert record.state is JobState.FAILED
    (fault,) = [fault for fault in over(mesh, record.job) if fault.kind == "microbatch"]
    assert fault.state is FaultState.GIVEN_UP
    assert (fault.task.step, fault.task.microbatch, fault.task.stage) == (1, 1, 0)
    assert fault.attempts == 2 > fault.limit
    assert any("LookupError: no such word (troubled.py:" in line for line in fault.log)
    assert any("Traceback" in line for line in fault.log), "the instance's own log is in the record"
    assert record.reason in fault.action


@pytest.mark.parametrize("reaction", ["raise", "nan", "raise in backward"])
def test_a_step_with_a_bad_microbatch_is_left_out_by_policy(
    mesh: Mesh, source: Path, sound: str, reaction: str
) -> None:
    """The same weights, whoever did the work; and other ones than if the step had been run."""
    digests = set()
    for stages, replicas in ((1, 1), (2, 2)):
        record, seen = run(
            mesh,
            "allergic",
            source,
            model={"args": {"poison": poison(source, 2), "reaction": reaction}},
            training={"steps": 5, "on_bad_microbatch": "skip"},
            parallel={"stages": stages, "replicas": replicas},
        )
        assert record.state is JobState.DONE, record.reason
        assert record.step == 5
        assert record.weights is not None
        digests.add(record.weights.sha256)
        (skipped,) = [event for event in seen if event.kind == "skipped"]
        assert skipped.skipped_step == 2
        assert "step 2, microbatch 1" in skipped.text
        assert committed(seen) == [0, 1, 3, 4]
        assert 1 <= record.recoveries <= 4
        (fault,) = [fault for fault in over(mesh, record.job) if fault.kind == "microbatch"]
        assert fault.state is FaultState.HANDLED
        assert "step 2 left out" in fault.action
    assert len(digests) == 1
    assert sound not in digests


def test_a_third_replica_takes_the_others_past_a_bad_step(mesh: Mesh, source: Path) -> None:
    """Two of three fail at it; while the third is still at it the step is given up, without a roll-back."""
    with counter() as met:
        record, seen = run(
            mesh,
            "allergic",
            source,
            model={"args": {"poison": poison(source, 2), "reaction": f"raise twice: {met.address}"}},
            training={"steps": 5, "on_bad_microbatch": "skip"},
            parallel={"replicas": 3},
        )
    assert met.met in (2, 3), "the fault never fired"  # the third may not get to it
    assert record.state is JobState.DONE, record.reason
    assert [event.skipped_step for event in seen if event.kind == "skipped"] == [2]
    assert [event.result.step for event in seen if event.result is not None] == [0, 1, 3, 4]
    assert JobState.RECOVERING not in {event.state for event in seen}
    assert record.recoveries == 2
    (fault,) = [fault for fault in over(mesh, record.job) if fault.kind == "microbatch"]
    assert (fault.state, fault.attempts) == (FaultState.HANDLED, 2)


def test_a_fault_of_the_machine_is_not_the_microbatchs(mesh: Mesh, source: Path) -> None:
    """Once only, on one instance: the step is done again and counts, with `skip` as with `stop`."""
    with counter() as met:
        args = {"poison": poison(source, 2), "reaction": f"raise once: {met.address}"}
        training = {"steps": 4, "on_bad_microbatch": "skip"}
        record, seen = run(mesh, "allergic", source, model={"args": args}, training=training)
    assert met.met, "the fault never fired"
    assert record.state is JobState.DONE, record.reason
    assert committed(seen) == [0, 1, 2, 3]
    assert not [event for event in seen if event.kind == "skipped"]
    (fault,) = [fault for fault in over(mesh, record.job) if fault.kind == "microbatch"]
    assert (fault.state, fault.attempts) == (FaultState.HANDLED, 1)
    assert "step 2 committed" in fault.action


def test_a_model_that_can_compute_nothing_never_loops(mesh: Mesh, source: Path) -> None:
    record, seen = run(
        mesh,
        "allergic",
        source,
        model={"args": {"poison": poison(source, 0, 0), "reaction": "raise at all others"}},
        training={"steps": 100, "on_bad_microbatch": "skip", "microbatches": MICROBATCHES},
    )
    assert record.state is JobState.FAILED
    assert record.reason.startswith("steps 0 to 2 can't be computed: it is not their data alone")
    assert {event.skipped_step for event in seen if event.kind == "skipped"} == {0, 1}
    assert len(seen) < 200
