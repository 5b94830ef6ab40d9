"""From no machine to the first step and back to none, on a real API server (docs/kubernetes.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
import yaml

from benchmarks.kubernetes.control_plane import ControlPlane
from benchmarks.kubernetes.fake_kubelet import ApiClient, FakeKubelet
from bus import subjects
from bus.messaging.key_value import Change
from bus.server.embedded import EmbeddedServer
from schemas.errors import NoResponders, Unavailable
from schemas.gateway_api import MeshStatus
from schemas.machines.records import Machine, MachineState, PoolRecord
from schemas.registry import InstanceState
from tests.integration.kubernetes.conftest import start_warm
from tests.integration.mesh.conftest import tiny_job
from tests.integration.mesh.expected_weights import check_weights_at
from tests.integration.mesh.own_mesh import CLUSTERS, OwnMesh, Witness, users_file
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually

STAGES = 2


class Seen:
    """All that was ever written of the machines; and kills at the first of a state."""

    def __init__(self) -> None:
        self.states: dict[str, list[MachineState]] = {}
        self.last: PoolRecord | None = None
        self.due: list[tuple[MachineState, Any]] = []
        self.done: list[MachineState] = []

    async def written(self, change: Change) -> None:
        record = change.message
        if not isinstance(record, PoolRecord):
            return
        self.last = record
        for machine in (*record.machines, *record.ended):
            await self._note(machine)

    async def _note(self, machine: Machine) -> None:
        states = self.states.setdefault(machine.id, [])
        if states[-1:] != [machine.state]:
            states.append(machine.state)
            if self.due and self.due[0][0] is machine.state:
                state, kill = self.due.pop(0)
                self.done.append(state)
                await asyncio.to_thread(kill)


@pytest_asyncio.fixture
async def own(
    tmp_path: Path, server: EmbeddedServer, control_plane: ControlPlane, namespace: str
) -> AsyncIterator[OwnMesh]:
    """A mesh without any node, and a provisioner whose pool is a namespace."""
    rules = {
        "image": "dmsc:test",
        "namespace": namespace,
        "kubeconfig": str(control_plane.kubeconfig),
        "resources": {"cpu": "1"},
        "grace_s": 5,
    }
    pool = {
        "driver": "kubernetes",
        "cluster": "a",
        "most": 3,
        "slots": 1,
        "idle_s": 0.5,
        "boot_s": NEVER_S,
        "kubernetes": rules,
    }
    file = tmp_path / "pools.yaml"
    file.write_text(yaml.safe_dump({"name": "t", "pools": {"far": pool}}))
    mesh = OwnMesh(tmp_path, [server])
    try:
        mesh.start("registry", ["run", "service-registry"])
        mesh.start("authorizer", ["run", "authorizer", "--tokens", str(users_file(tmp_path))])
        mesh.start("smo-1", ["run", "orchestrator"])
        for cluster in CLUSTERS:
            mesh.start(f"router-{cluster}", ["run", "router", "--cluster", cluster])
            mesh.start(f"gateway-{cluster}", ["run", "gateway", "--cluster", cluster])
        mesh.start("provisioner", ["run", "provisioner", "--pools", str(file)])
        yield mesh
    finally:
        mesh.stop_all()


@pytest_asyncio.fixture
async def kubelet(own: OwnMesh, admin: ApiClient, tmp_path: Path) -> AsyncIterator[FakeKubelet]:
    environment = {"DMSC_ALLOW_URL": "*", "DMSC_TRUST_RESEARCHERS": "1"}
    nodes = {f"n-{tmp_path.name}"[:60].lower().replace("_", "-"): {}}
    kubelet = FakeKubelet(admin, tmp_path, nodes, {"cpu": "8"}, environment, start_warm)
    async with kubelet.running():
        yield kubelet


@pytest_asyncio.fixture
async def user(own: OwnMesh) -> AsyncIterator[Witness]:
    async with own.client() as client:
        await eventually(lambda: is_there(client), "not ready", 0.05)
        yield client


async def is_there(client: Witness) -> bool:
    dead = client.mesh.processes.keys() - client.mesh.alive().keys()
    assert not dead, "\n".join(f"{name} ended: {client.mesh.last_words(name)}" for name in dead)
    try:
        status = await client.ask("mesh.read")
    except (Unavailable, NoResponders):
        return False
    assert isinstance(status, MeshStatus)
    active = {each.sid for each in status.services if each.state is InstanceState.ACTIVE}
    return {"gateway-a", "router-a", "provisioner", "orchestrator", "authorizer"} <= active


async def test_a_job_gets_its_pods_and_whatever_is_killed_none_is_ordered_twice(
    own: OwnMesh,
    user: Witness,
    kubelet: FakeKubelet,
    control_plane: ControlPlane,
    admin: ApiClient,
    namespace: str,
) -> None:
    def again(name: str) -> None:
        own.kill(name)
        own.start(name)

    def api_server() -> None:
        control_plane.kill("kube-apiserver")
        control_plane.start_api_server()

    seen = Seen()
    seen.due = [
        (MachineState.ORDERED, api_server),
        (MachineState.STARTING, lambda: again("provisioner")),
        (MachineState.JOINED, lambda: again("smo-1")),
        (MachineState.RELEASED, api_server),
    ]
    watch = await user.bus.bucket(subjects.MACHINE_POOL).watch(seen.written)
    job = await user.submit(tiny_job("pods", training={"steps": 3}, parallel={"stages": STAGES}))
    await check_weights_at(user, job)
    async with asyncio.timeout(PATIENCE_S):
        await eventually(
            lambda: seen.last is not None and seen.last.number and not seen.last.machines,
            lambda: f"{seen.last} {own.last_words('provisioner')}",
        )
    await watch.stop()
    assert seen.last is not None
    assert [state for state, _ in seen.due] == [], "each kill has to have happened"
    assert seen.last.number == STAGES, "a machine too many was ordered"
    assert seen.last.failures == 0
    assert len(kubelet.began) == STAGES, kubelet.began
    for number in range(1, STAGES + 1):
        assert seen.states[f"t-far-{number}"].count(MachineState.ORDERED) == 1
    assert await admin.items(f"/api/v1/namespaces/{namespace}/pods") == []
    assert await admin.items(f"/apis/batch/v1/namespaces/{namespace}/jobs") == []
