"""Draft §4.4(5), §5.5: an instance is killed; MG or SR reports, the SMO locates and replaces.

With exact accumulation the weights are then the same, bit for bit, as without the fault.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from bus.server.embedded import find_binary
from dmsc.chaos.processes import LocalMesh
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind
from schemas.job import JobEvent, JobRecord, JobSpec, JobState
from tests.integration.dmsc.command_line import running, wait_for
from tests.integration.mesh.conftest import Mesh, start_mesh, stop_mesh, tiny_job
from tests.integration.mesh.undisturbed import undisturbed
from tests.patience import PATIENCE_S
from tests.warm_processes import incubator

STEPS, KILL_AT = 7, 2
"""Behind the first checkpoint."""
PARTS = ["broker", "router-a", "gateway-a", "service-registry", "authorizer", "orchestrator", "nats-server"]
PARTS_STEPS = 24


def shape(name: str) -> JobSpec:
    """Padded, so that the fault is there long before the end."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "context": 32, "dropout": 0.1, "pad_ms": 15.0}
    return tiny_job(
        name,
        model={"factory": "workers.models.padded:padded_gpt", "args": sizes},
        training={"steps": STEPS, "seed": 11, "checkpoint_every": 2},
        parallel={"stages": 2, "replicas": 2},
    )


def pid_of(mesh: Mesh, sid: str) -> int:
    found = [one for one in mesh.client.mesh().services if one.sid == sid and one.kind is EntityKind.INSTANCE]
    assert found, f"{sid} is not registered"
    return found[0].endpoint.pid


def run_and_kill(
    mesh: Mesh, spec: JobSpec, victims: list[str], at_step: int, how: signal.Signals = signal.SIGKILL
) -> tuple[JobRecord, list[JobEvent]]:
    """Submits, kills the named instances once `at_step` is committed, waits for the end."""
    job = mesh.client.submit(spec).job
    seen: list[JobEvent] = []
    killed: list[int] = []
    for event in mesh.client.events(job):
        seen.append(event)
        if event.result is not None and event.result.step == at_step and not killed:
            killed = [pid_of(mesh, f"{job}-{victim}") for victim in victims]
            for pid in killed:
                os.kill(pid, how)
    assert len(killed) == len(victims), "the fault never fired"
    return mesh.client.wait(job, timeout_s=PATIENCE_S), seen


def test_a_killed_instance_is_replaced_and_the_weights_are_the_same(mesh: Mesh) -> None:
    """What depends on the phase of the step is in `test_transaction_faults`."""
    victim = "s1-r1"
    record, seen = run_and_kill(mesh, shape("killed"), [victim], at_step=KILL_AT)
    assert record.state is JobState.DONE, record.reason
    assert record.recoveries >= 1
    faults = [event.text for event in seen if event.kind == "fault"]
    told = [text for text in faults if f"-{victim}: " in text and "transient" not in text]
    assert len(told) == 1, faults  # whoever noticed it first, and nobody again
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(mesh.client, record.spec)
    assert [event.result.step for event in seen if event.result is not None] == list(range(STEPS))


def test_the_control_plane_is_killed_and_the_job_goes_on_from_its_checkpoint(mesh: Mesh) -> None:
    job = mesh.client.submit(shape("control-plane-killed")).job
    killed = 0
    for event in mesh.client.events(job):
        if event.result is not None and event.result.step == KILL_AT:
            killed = json.loads((mesh.state / "mesh.json").read_text())["children"]["control-plane"]
            os.kill(killed, signal.SIGKILL)
            break
    assert killed, "the fault never fired"
    record = mesh.client.wait(job, timeout_s=PATIENCE_S)
    assert record.state is JobState.DONE, record.reason
    assert record.epoch == 2
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(mesh.client, record.spec)


def test_each_part_of_a_guarded_mesh_is_killed_in_turn_and_no_instance_is_lost(tmp_path: Path) -> None:
    """Each as a process of its own, and the bus's server: all have to let each other in again."""
    find_binary()
    mesh = start_mesh(tmp_path / "state", "--separate", "--cluster", "a", "--slots", "2")
    try:
        parts = LocalMesh(StateFolder(mesh.state))
        padded = shape("padded").model.model_dump()
        spec = tiny_job(
            "parts-killed",
            model={**padded, "args": {**padded["args"], "pad_ms": 40.0}},
            training={"steps": PARTS_STEPS, "seed": 11},
            parallel={"stages": 2},
        )
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
        record = mesh.client.wait(job, timeout_s=PATIENCE_S)
        assert record.state is JobState.DONE, record.reason
        assert list(killed) == PARTS, "the others came too late"
        assert max(step for _, step in killed.values()) < PARTS_STEPS - 1
        assert record.recoveries == 0
        assert record.weights is not None
        assert record.weights.sha256 == undisturbed(mesh.client, spec)
    finally:
        assert stop_mesh(mesh) == 0


def test_a_killed_node_agent_takes_its_instances_along_and_the_job_goes_on(mesh: Mesh) -> None:
    job = mesh.client.submit(shape("agent-killed")).job
    killed = 0
    for event in mesh.client.events(job):
        if event.result is not None and event.result.step == KILL_AT and not killed:
            killed = json.loads((mesh.state / "mesh.json").read_text())["children"]["agent-b"]
            os.kill(killed, signal.SIGKILL)
    assert killed, "the fault never fired"
    record = mesh.client.wait(job, timeout_s=PATIENCE_S)
    assert record.state is JobState.DONE, record.reason
    assert record.recoveries >= 1
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(mesh.client, record.spec)


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
        job = mesh.client.submit(spec).job
        record = mesh.client.wait(job, timeout_s=PATIENCE_S)
    assert record.state is JobState.DONE, record.reason
    assert record.graph is not None
    assert {place.cluster for place in record.graph.placements} == {"a"}
    told = [event.text for event in mesh.client.events(job) if event.kind == "fault"]
    assert any("planned again" in text for text in told), told
