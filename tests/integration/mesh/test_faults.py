"""Draft §4.4(5), §5.5: an instance is killed; MG or SR reports, the SMO locates and replaces.

With exact accumulation the weights are then the same, bit for bit, as without the fault.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bus.server.embedded import find_binary
from dmsc.chaos.processes import LocalMesh
from dmsc.models.signature_check import is_trusted
from dmsc.state.state_folder import StateFolder
from schemas.job import JobEvent, JobRecord, JobSpec, JobState
from tests.integration.dmsc.command_line import running, wait_for
from tests.integration.mesh.conftest import Mesh, done, padded, running_mesh, tiny_job, until_step
from tests.integration.mesh.expected_weights import check_weights
from tests.warm_processes import incubator

STEPS, KILL_AT = 7, 2
"""Behind the first checkpoint."""
PARTS = [
    *("broker", "router-a", "gateway-a", "model-registry", "service-registry", "authorizer", "orchestrator"),
    "nats-server",
]
PARTS_STEPS = 27


def shape(name: str) -> JobSpec:
    """Padded, so that the fault is there long before the end."""
    training = {"steps": STEPS, "seed": 11, "checkpoint_every": 2}
    return padded(tiny_job(name, training=training, parallel={"stages": 2, "replicas": 2}), 15.0)


def run_and_kill(mesh: Mesh, name: str, victim: Callable[[str], int]) -> tuple[JobRecord, list[JobEvent]]:
    """Kills a process, which `victim` finds, once `KILL_AT` is committed; the weights are the same."""
    job = mesh.client.submit(shape(name)).job
    until_step(mesh.client, job, KILL_AT)
    os.kill(victim(job), signal.SIGKILL)
    return check_weights(mesh.client, job), list(mesh.client.events(job))


def test_a_killed_instance_is_replaced_and_the_weights_are_the_same(mesh: Mesh) -> None:
    """What depends on the phase of the step is in `test_transaction_faults`."""
    victim = "s1-r1"
    record, seen = run_and_kill(mesh, "killed", lambda job: mesh.instance(f"{job}-{victim}").endpoint.pid)
    assert record.recoveries >= 1
    faults = [event.text for event in seen if event.kind == "fault"]
    told = [text for text in faults if f"-{victim}: " in text and "transient" not in text]
    assert len(told) == 1, faults  # whoever noticed it first, and nobody again
    assert [event.result.step for event in seen if event.result is not None] == list(range(STEPS))


def test_after_a_roll_back_the_replacement_takes_part_in_a_validation(mesh: Mesh) -> None:
    """The job goes back to a step that is validated, before any group is formed with the replacement."""
    training = {"steps": 16, "checkpoint_every": 4, "validate_every": 2}
    spec = padded(tiny_job("validated", training=training, parallel={"stages": 2}), 5.0)
    job = mesh.client.submit(spec).job
    until_step(mesh.client, job, 5)
    os.kill(mesh.instance(f"{job}-s1-r0").endpoint.pid, signal.SIGKILL)
    assert check_weights(mesh.client, job).recoveries >= 1


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_an_instance_is_killed_in_the_validation_before_the_first_step(mesh: Mesh, replicas: int) -> None:
    """No step was opened yet: members change, and the validation begins again, as at any other boundary."""
    training = {"steps": 4, "seed": 11, "validate_every": 4, "validation_microbatches": 60}
    parallel = {"stages": 2, "replicas": replicas}
    spec = padded(tiny_job("validated-first", training=training, parallel=parallel), 50.0)
    job = mesh.client.submit(spec).job
    for event in mesh.client.events(job):
        if event.state is JobState.RUNNING:
            break
    os.kill(mesh.instance(f"{job}-s1-r{replicas - 1}").endpoint.pid, signal.SIGKILL)
    assert check_weights(mesh.client, job).recoveries >= 1
    kinds = [event.kind for event in mesh.client.events(job)]
    assert kinds.index("fault") < kinds.index("validation") < kinds.index("step")


def test_the_control_plane_is_killed_and_the_job_goes_on_from_its_checkpoint(mesh: Mesh) -> None:
    record, _ = run_and_kill(mesh, "control-plane-killed", lambda job: mesh.children["control-plane"])
    assert record.epoch == 2


def test_each_part_of_a_guarded_mesh_is_killed_in_turn_and_no_instance_is_lost(tmp_path: Path) -> None:
    """Each as a process of its own, and the bus's server: all have to let each other in again."""
    find_binary()
    with running_mesh(tmp_path / "state", "--separate", "--cluster", "a", "--slots", "2") as mesh:
        parts = LocalMesh(StateFolder(mesh.state))
        training = {"steps": PARTS_STEPS, "seed": 11}
        register = {"name": "parts", "alias": "candidate"}
        sections = {"training": training, "parallel": {"stages": 2}, "register": register}
        spec = padded(tiny_job("parts-killed", **sections), 40.0)
        job = mesh.client.submit(spec).job
        killed: dict[str, tuple[int, int]] = {}
        for event in mesh.client.events(job):
            alive = {part.name: part.pid for part in parts.alive(job, []).parts}
            back = all(alive.get(name, pid) != pid for name, (pid, _) in killed.items())
            left = [name for name in PARTS if name not in killed]
            if event.result is None or not back or not left:
                continue
            killed[left[0]] = (alive[left[0]], event.result.step)
            os.kill(alive[left[0]], signal.SIGKILL)
        record = check_weights(mesh.client, job)
        assert list(killed) == PARTS, "the others came too late"
        assert max(step for _, step in killed.values()) < PARTS_STEPS - 1
        assert record.recoveries == 0
        # the weights are a version, once, which the mesh has signed
        wait_for(lambda: named(mesh) == {"candidate": 1}, lambda: f"registered: {named(mesh)}")
        (version,) = mesh.client.model_versions("parts")
        assert record.weights is not None
        assert (version.sha256, version.lineage.job) == (record.weights.sha256, job)
        assert is_trusted(version, mesh.client.model_keys())


def named(mesh: Mesh) -> dict[str, int]:
    """What the aliases of all models name."""
    return {alias: number for model in mesh.client.models() for alias, number in model.aliases.items()}


def test_a_killed_node_agent_takes_its_instances_along_and_the_job_goes_on(mesh: Mesh) -> None:
    record, _ = run_and_kill(mesh, "agent-killed", lambda job: mesh.children["agent-b"])
    assert record.recoveries >= 1


def test_a_job_that_was_placed_on_a_node_that_has_just_died_is_planned_again(
    mesh: Mesh, tmp_path: Path
) -> None:
    """For some seconds the node is still registered, with free slots."""
    environment = {"DMSC_BUS_TOKEN": mesh.bus_token or "", **incubator()}
    arguments = ("join", mesh.servers[0], "--cluster", "doomed", "--node", "d", "--slots", "2")

    def registered() -> bool:
        return any(node.cluster == "doomed" and node.warm for node in mesh.client.mesh().nodes)

    with running(*arguments, cwd=tmp_path, **environment) as node:
        wait_for(registered, lambda: node.output)
        node.process.kill()
        node.wait()
        assert registered(), "the mesh knows it already: nothing is tested"
        spec = tiny_job(
            "just-died", training={"steps": 3}, parallel={"replicas": 2, "clusters": ["a", "doomed"]}
        )
        record = done(mesh.client, mesh.client.submit(spec).job)
    assert record.graph is not None
    assert {place.cluster for place in record.graph.placements} == {"a"}
    told = [event.text for event in mesh.client.events(record.job) if event.kind == "fault"]
    assert any("planned again" in text for text in told), told
