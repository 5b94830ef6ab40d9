"""Taking nodes, slots and devices out of use: cordon, drain, uncordon; and devices that tell of errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bus import subjects
from schemas.cluster import NodeStatus
from schemas.envelope import EntityKind
from schemas.errors import DmscError, NotFound
from schemas.fault import FaultState
from schemas.gateway_api import MeshStatus
from schemas.job import JobSpec, JobState
from schemas.registry import InstanceState
from schemas.telemetry import DeviceSample, InstanceSample
from tests.integration.dmsc.command_line import wait_for
from tests.integration.mesh.conftest import Mesh, done, padded, tiny_job, until_step
from tests.integration.mesh.expected_weights import check_weights
from tests.integration.mesh.user_jobs import held_job, holding, user_job
from workers.telemetry import device_telemetry

OVER = (InstanceState.FAULTED, InstanceState.GONE)


@pytest.fixture(autouse=True)
def _nothing_stays_cordoned(mesh: Mesh) -> Iterator[None]:
    yield
    for agent in {cordon.agent for cordon in mesh.client.mesh().cordons}:
        mesh.client.uncordon(agent)
    assert mesh.client.mesh().cordons == ()


def agent(mesh: Mesh, cluster: str) -> NodeStatus:
    """Its node, once it is warm and offers its slots."""
    wait_for(lambda: all(node.slots for node in mesh.client.mesh().nodes))
    (found,) = [node for node in mesh.client.mesh().nodes if node.cluster == cluster]
    return found


def where(status: MeshStatus, job: str) -> dict[str, str]:
    """Cluster of each of the job's living instances, by SID."""
    return {
        record.sid: record.endpoint.cluster
        for record in status.services
        if record.kind is EntityKind.INSTANCE and record.job == job and record.state not in OVER
    }


def held_in_b(mesh: Mesh, source: Path, gate: Path) -> AbstractContextManager[str]:
    """A job that is held in mid-run."""
    return holding(mesh.client, held_job(source, gate, parallel={"clusters": ["b"]}))


# --- cordon ---------------------------------------------------------------------------------------------
def test_cordoned_slots_get_no_new_instances_and_say_why(mesh: Mesh, source: Path) -> None:
    node = agent(mesh, "a").sid
    for slot in range(5):
        said = mesh.printed("cordon", f"{node}/{slot}", "--reason", "noisy fan")
        assert f"{node}/{slot}: cordoned: noisy fan, by " in said
    spec = user_job("sound", source, parallel={"clusters": ["a"], "replicas": 2})
    waiting = mesh.client.submit(spec).job
    for event in mesh.client.events(waiting):
        if event.state is JobState.QUEUED and "needs 2 slots, 1 of 6 free (5 cordoned) in a" in event.text:
            break
    assert len(re.findall(r"noisy fan, by ", mesh.printed("nodes"))) == 5
    listed = json.loads(mesh.printed("nodes", "--json"))
    assert {cordon["slot"] for cordon in listed["cordons"]} == set(range(5))
    mesh.printed("uncordon", f"{node}/0")
    done(mesh.client, waiting)
    placed = mesh.client.job(waiting).graph
    assert placed is not None
    assert {place.slot for place in placed.placements if place.slot >= 0} == {0, 5}


def test_a_cordoned_node_keeps_what_runs_there(mesh: Mesh, source: Path, tmp_path: Path) -> None:
    with held_in_b(mesh, source, tmp_path / "gate") as job:
        before = where(mesh.client.mesh(), job)
        assert set(before.values()) == {"b"}
        mesh.client.cordon(agent(mesh, "b").sid, reason="later")
        graph = done(mesh.client, mesh.client.submit(user_job("sound", source)).job).graph
        assert graph is not None
        assert {place.cluster for place in graph.placements} == {"a"}
        assert where(mesh.client.mesh(), job) == before
    assert mesh.client.job(job).recoveries == 0


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("cordon", "nobody"), r"dmsc: no node nobody; there are a-\S+, b-\S+"),
        (("cordon", "A/99"), r"dmsc: a-\S+ has no slot 99; it has 6, numbered from 0"),
        (("cordon", "A/first"), r"dmsc: \S+/first: the slot must be a number, as in \S+/0"),
        (("cordon", "NAME"), r"dmsc: node \S+ is in several clusters: say a-\S+ or b-\S+"),
        (("uncordon", "A"), r"dmsc: a-\S+ is not cordoned; `dmsc nodes` shows what is"),
        (("drain", "A/1"), r"dmsc: \S+/1: whole nodes are drained; for one slot: dmsc cordon \S+/1"),
    ],
)
def test_a_wrong_place_is_one_line(mesh: Mesh, command: tuple[str, str], line: str) -> None:
    node = agent(mesh, "a")
    place = command[1].replace("NAME", node.node)
    place = re.sub(r"^A\b", node.sid, place)
    told = mesh.dmsc(command[0], place)
    assert told.returncode == 2, told.stdout
    assert re.fullmatch(line, told.stderr.strip()), told.stderr


# --- drain ----------------------------------------------------------------------------------------------
STEPS = 12


def long_job(name: str, replicas: int) -> JobSpec:
    """Padded, so that a drain finds the job running; a step takes as long with replicas as without."""
    parallel = {"stages": 2, "replicas": replicas, "clusters": ["a", "b"]}
    return padded(tiny_job(name, training={"steps": STEPS, "seed": 5}, parallel=parallel), 25.0 * replicas)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_drained_node_is_emptied_and_the_weights_are_the_same(mesh: Mesh, replicas: int) -> None:
    """Also where a stage has no other replica: a checkpoint of that very step carries it over."""
    job = mesh.client.submit(long_job("drained", replicas)).job
    until_step(mesh.client, job, 1)
    occupied = set(where(mesh.client.mesh(), job).values())
    cluster = "b" if replicas == 2 else sorted(occupied)[0]
    assert cluster in occupied
    node = agent(mesh, cluster).sid
    mesh.client.drain(node, reason="new fans")
    wait_for(lambda: cluster not in where(mesh.client.mesh(), job).values())
    assert mesh.client.job(job).state not in (JobState.DONE, JobState.FAILED), "the drain came too late"
    status = mesh.client.mesh()
    (cordon,) = status.cordons
    assert (cordon.agent, cordon.reason, cordon.draining) == (node, "new fans", True)
    record = check_weights(mesh.client, job)
    seen = list(mesh.client.events(job))
    steps = [event.result.step for event in seen if event.result is not None]
    assert steps == list(range(STEPS)), "no step was lost or run twice"
    rolled_back = [event for event in seen if event.state is JobState.RECOVERING]
    assert bool(rolled_back) == (replicas == 1), "a stage with a replica goes on with that one"
    assert all("leaves its node" in event.text for event in rolled_back)
    assert record.recoveries == 0, "nothing was wrong"
    assert [fault for fault in mesh.client.faults(job) if fault.kind in ("instance", "node")] == []
    mesh.client.uncordon(node)


def test_a_node_that_is_empty_is_drained_at_once(mesh: Mesh) -> None:
    node = agent(mesh, "b").sid
    assert mesh.printed("drain", node, "--timeout", "60").strip() == f"{node} is empty and cordoned"


def test_a_drain_without_room_moves_nothing_and_says_what_it_waits_for(
    mesh: Mesh, source: Path, tmp_path: Path
) -> None:
    with held_in_b(mesh, source, tmp_path / "gate") as job:
        node = agent(mesh, "b").sid
        before = where(mesh.client.mesh(), job)
        told = mesh.dmsc("drain", node, "--timeout", "2")
        assert told.returncode == 1
        assert re.fullmatch(
            rf"{node} is not empty after 2 s: 2 left; {job}-\S+: .*cordoned.*", told.stderr.strip()
        ), told.stderr
        assert where(mesh.client.mesh(), job) == before


# --- devices --------------------------------------------------------------------------------------------
async def tell_of_errors(
    mesh: Mesh, node: NodeStatus, job: str, sid: str, incarnation: str, ecc: int
) -> None:
    """A sample as the instance itself sends it, but for its device's errors: there is no broken one here."""
    sample = InstanceSample(
        job=job,
        sid=sid,
        incarnation=incarnation,
        cluster=node.cluster,
        node=node.node,
        stage=0,
        step=0,
        device=DeviceSample(device=node.slots[0].device, ecc_errors=ecc, xid_errors=(31,)),
    )
    async with mesh.bus(sid, EntityKind.INSTANCE) as bus:
        await bus.publish(subjects.INSTANCE_SAMPLE, sample, job=job, sid=sid)
        await bus.barrier()


def test_a_device_that_tells_of_errors_is_cordoned_until_an_operator_lifts_it(
    mesh: Mesh, source: Path, tmp_path: Path
) -> None:
    def device_faults() -> list[str]:
        return [
            fault.id
            for fault in mesh.client.faults()
            if fault.kind == "device" and fault.state is FaultState.HANDLED
        ]

    with held_in_b(mesh, source, tmp_path / "gate") as job:
        node = agent(mesh, "b")
        record = mesh.instance(f"{job}-s0-r0")
        known = device_faults()

        def tell(ecc: int) -> None:
            asyncio.run(tell_of_errors(mesh, node, job, record.sid, record.incarnation, ecc))

        tell(0)  # XID 31 is a program's fault: nothing comes of it
        tell(2)
        wait_for(lambda: len(mesh.client.mesh().cordons) == 6, lambda: str(mesh.client.mesh().cordons))
        cordons = mesh.client.mesh().cordons
        assert {(one.agent, one.by) for one in cordons} == {(node.sid, "orchestrator")}
        assert cordons[0].reason == f"{node.slots[0].device}: 2 uncorrected ECC errors"
        wait_for(lambda: len(device_faults()) == len(known) + 1)
        (fault,) = [fault for fault in mesh.client.faults() if fault.id in device_faults()[len(known) :]]
        assert (fault.task.sid, fault.task.device) == (node.sid, node.slots[0].device)
        assert fault.verdict == "structural"
        assert fault.action == f"draining {node.sid}, slots 0, 1, 2, 3, 4, 5"
        assert all(one.draining for one in cordons)
        wait_for(  # the job may use this cluster alone: it works on, and that is said
            lambda: any("cordoned" in one.progress for one in mesh.client.mesh().cordons),
            lambda: str(mesh.client.mesh().cordons),
        )

        mesh.client.uncordon(node.sid)
        assert mesh.client.mesh().cordons == ()
        tell(2)  # known, and lifted all the same
        tell(3)
        wait_for(lambda: len(mesh.client.mesh().cordons) == 6)
        assert "3 uncorrected ECC errors" in mesh.client.mesh().cordons[0].reason
        assert len(device_faults()) <= len(known) + 2
        mesh.client.uncordon(node.sid)


def test_an_instance_leaves_a_device_whose_driver_tells_of_an_error(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the driver's event in the instance's own process to the same weights on another node."""
    # the plain loop builds the model in this process
    monkeypatch.setattr(device_telemetry, "_probe", device_telemetry._probe)
    struck = tmp_path / "struck"
    spec = padded(long_job("ailing", 1), 25.0, factory="ailing:ailing_gpt", struck=str(struck))
    job = mesh.client.submit(spec).job
    until_step(mesh.client, job, 1)
    victim = mesh.instance(f"{job}-s0-r0")
    struck.write_text(str(victim.endpoint.pid))
    home = victim.endpoint.cluster
    wait_for(lambda: where(mesh.client.mesh(), job).get(victim.sid, home) != home)
    assert mesh.client.job(job).state not in (JobState.DONE, JobState.FAILED), "the error came too late"
    cordons = mesh.client.mesh().cordons
    assert {(one.agent, one.draining) for one in cordons} == {(agent(mesh, home).sid, True)}
    assert {one.reason for one in cordons} == {"cpu: XID 79"}
    record = check_weights(mesh.client, job)
    assert (record.recoveries, home in where(mesh.client.mesh(), job).values()) == (0, False)
    assert any("leaves its node" in event.text for event in mesh.client.events(job))


# --- restarts -------------------------------------------------------------------------------------------
def test_cordons_survive_orchestrator_and_agent(mesh: Mesh) -> None:
    node = agent(mesh, "a")
    mesh.client.cordon(node.sid, 1, reason="to stay")
    children = mesh.children
    before = mesh.client.mesh()
    (served,) = [one for one in before.services if one.sid == "orchestrator"]
    os.kill(children["agent-a"], signal.SIGKILL)
    os.kill(children["control-plane"], signal.SIGKILL)

    def back() -> bool:
        try:
            now = mesh.client.mesh()
        except DmscError:
            return False
        again = [one for one in now.nodes if one.sid == node.sid and one.slots]
        new = [one for one in now.services if one.sid == "orchestrator"]
        return bool(
            again
            and again[0].incarnation != node.incarnation
            and new
            and new[0].incarnation != served.incarnation
        )

    wait_for(back)
    (cordon,) = mesh.client.mesh().cordons
    assert (cordon.agent, cordon.slot, cordon.reason) == (node.sid, 1, "to stay")
    mesh.client.uncordon(node.sid, 1)
    with pytest.raises(NotFound):
        mesh.client.uncordon(node.sid, 1)
