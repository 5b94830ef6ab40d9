"""A whole mesh by its chart: installed, trains from zero, is upgraded meanwhile, and leaves nothing."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from benchmarks.kubernetes.control_plane import ControlPlane
from benchmarks.kubernetes.fake_kubelet import ApiClient, FakeKubelet
from bus.server.embedded import EmbeddedServer
from dmsc.client.async_client import AsyncClient
from dmsc.process.secret_manifests import secret_manifests
from dmsc.state.state_folder import StateFolder
from schemas.errors import DmscError
from schemas.job import ENDED, JobRecord, JobState
from tests import exact_loop
from tests.integration.kubernetes.conftest import start_warm
from tests.integration.mesh.conftest import tiny_job
from tests.kubernetes.helm_chart import HelmRelease, helm
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "state")
    folder.path.mkdir()
    folder.write_tokens()
    return folder


@pytest_asyncio.fixture
async def bus(state: StateFolder) -> AsyncIterator[EmbeddedServer]:
    """The bus is outside, as in production; it asks the authorizers about each connection."""
    helm()
    guarded = EmbeddedServer(state.store, guard=state.guard_keys(), sync_always=False)
    async with guarded as server:
        yield server


@pytest_asyncio.fixture
async def kubelet(admin: ApiClient, tmp_path: Path, namespace: str) -> AsyncIterator[FakeKubelet]:
    """Three nodes in three zones."""
    zones = {
        f"{namespace}-{zone}": {"topology.kubernetes.io/zone": zone, "of": namespace}
        for zone in ("z1", "z2", "z3")
    }
    kubelet = FakeKubelet(admin, tmp_path, zones, {"cpu": "16", "memory": "64Gi"}, start=start_warm)
    async with kubelet.running():
        yield kubelet


def values_of(bus: EmbeddedServer, namespace: str, port: int) -> dict[str, Any]:
    readable = str(Path(argparse.__file__).parent)
    machines = {
        "image": "dmsc:test",
        "secret": "dmsc-node-a",
        "owner": "mesh-machines",
        "resources": {"cpu": "1"},
        "grace_s": 5,
        "environment": {"DMSC_TRUST_RESEARCHERS": "1"},
    }
    pool = {
        "driver": "kubernetes",
        "cluster": "a",
        "most": 3,
        "slots": 1,
        "idle_s": NEVER_S,
        "boot_s": NEVER_S,
        "options": ["--allow-url", readable],
        "kubernetes": machines,
    }
    return {
        "bus": {"url": bus.url},
        "gateway": {"port": port},
        "nodeSelector": {"of": namespace},
        "environment": {"DMSC_ALLOW_URL": readable},
        "parts": {"policy": None, "accountant": None, "model-registry": None, "broker-2": None},
        "provisioner": {"pools": {"name": "t", "pools": {"far": pool}}},
    }


async def test_a_mesh_is_installed_trains_from_zero_while_it_is_upgraded_and_is_uninstalled_whole(
    control_plane: ControlPlane,
    admin: ApiClient,
    namespace: str,
    state: StateFolder,
    bus: EmbeddedServer,
    kubelet: FakeKubelet,
    tmp_path: Path,
) -> None:
    place = f"/api/v1/namespaces/{namespace}"
    for secret in secret_manifests(state, ["a"], "dmsc", ""):
        await admin.ask("POST", f"{place}/secrets", secret)
    release = HelmRelease(control_plane, namespace, tmp_path)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    values = values_of(bus, namespace, port)
    release.run("install", values)

    async with AsyncClient(f"http://127.0.0.1:{port}", token=state.token(), timeout_s=PATIENCE_S) as client:
        spec = tiny_job("released", training={"steps": 4}, parallel={"stages": 2})
        job = await eventually(lambda: submitted(client, spec), lambda: words(tmp_path), 0.2)
        await eventually(lambda: is_in(client, job, JobState.RUNNING, *ENDED), lambda: words(tmp_path), 0.2)
        environment = {**values["environment"], "DMSC_QUEUE_ORDER": "fair"}
        release.run("upgrade", {**values, "environment": environment})
        async with asyncio.timeout(PATIENCE_S):
            await eventually(lambda: is_in(client, job, *ENDED), lambda: words(tmp_path), 0.2)
        record = await eventually(lambda: read(client, job), "no gateway", 0.2)
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    peaceful = spec.model_copy(update={"parallel": type(spec.parallel)()})
    if not torch.cuda.is_available():  # bits are the device's, and the loop's is the CPU
        assert record.weights.sha256 == exact_loop.sha256(peaceful)
    machines = {name.rpartition("-")[0] for name in kubelet.began if name.startswith("t-far-")}
    assert machines == {"t-far-1", "t-far-2"}
    zones = {
        (await admin.ask("GET", f"/api/v1/nodes/{pod['spec']['nodeName']}"))["metadata"]["labels"][
            "topology.kubernetes.io/zone"
        ]
        for pod in await admin.items(
            f"{place}/pods", labelSelector="app.kubernetes.io/component=orchestrator"
        )
    }
    assert len(zones) > 1, "both orchestrators are in one zone"

    release.run("uninstall")
    await eventually(lambda: nothing_left(admin, namespace), lambda: words(tmp_path))
    left = {each["metadata"]["name"] for each in await admin.items(f"{place}/secrets")}
    assert "dmsc-authorizer" in left, "secrets are the user's"


async def submitted(client: AsyncClient, spec: Any) -> str:
    try:
        return (await client.submit(spec, idempotency_key="released")).job
    except DmscError as error:
        if not error.retryable:
            raise
        return ""


async def read(client: AsyncClient, job: str) -> JobRecord | None:
    try:
        return await client.job(job)
    except DmscError:
        return None


async def is_in(client: AsyncClient, job: str, *states: JobState) -> bool:
    record = await read(client, job)
    return record is not None and record.state in states


async def nothing_left(admin: ApiClient, namespace: str) -> bool:
    """Machines, too: they belong to an object of the release."""
    paths = [
        *(f"/api/v1/namespaces/{namespace}/{kind}" for kind in ("pods", "services")),
        *(f"/apis/apps/v1/namespaces/{namespace}/{kind}" for kind in ("deployments", "replicasets")),
        f"/apis/batch/v1/namespaces/{namespace}/jobs",
        f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
        f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    ]
    return not [item for path in paths for item in await admin.items(path)]


def words(folder: Path) -> str:
    """The ends of all logs."""
    return "\n".join(f"{file.name}: {file.read_text()[-400:]}" for file in sorted(folder.glob("*.log")))
