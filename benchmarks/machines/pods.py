"""Machines that are pods of a real API server: how soon, and what is ordered twice under kills of it, too."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.harness.figures import spread
from benchmarks.kubernetes.control_plane import ControlPlane, assets
from benchmarks.kubernetes.fake_kubelet import ApiClient, FakeKubelet
from benchmarks.machines.scene import Scene, job, open_scene
from schemas.machines.records import MachineState

STAGES = 2
POOL = "pods"
NAMESPACE = "default"
SECRET = "dmsc-node-a"
PAUSES_S = 0.1, 2.5
IDLE_S = 2.0


@dataclass
class Cluster:
    """The API server, its nodes, and the mesh whose machines are pods there."""

    plane: ControlPlane
    admin: ApiClient
    kubelet: FakeKubelet
    scene: Scene

    async def kill_api_server(self) -> None:
        """Kills it, and returns once it is ready again."""
        await asyncio.to_thread(self.plane.kill, "kube-apiserver")
        await asyncio.to_thread(self.plane.start_api_server)


@contextlib.asynccontextmanager
async def open_cluster() -> AsyncIterator[Cluster]:
    """All of it until the end of the block; the pool would give twice as many machines as a job needs."""
    with tempfile.TemporaryDirectory(prefix="dmsc-kubernetes-") as folder:
        place = Path(folder)
        with ControlPlane(place, assets()).running() as plane:
            admin = ApiClient(plane.kubeconfig)
            kubelet = FakeKubelet(admin, place, {"n1": {}, "n2": {}}, {"cpu": "8"})
            rules = {
                "driver": "kubernetes",
                "credential": "",
                "most": 2 * STAGES,
                "idle_s": IDLE_S,
                "kubernetes": {
                    "image": "dmsc",
                    "namespace": NAMESPACE,
                    "kubeconfig": str(plane.kubeconfig),
                    "secret": SECRET,
                    "resources": {"cpu": "1"},
                    "grace_s": 5,
                },
            }
            async with admin.http, kubelet.running(), open_scene({POOL: rules}) as scene:
                credential = base64.b64encode((scene.mesh.folder / "a.cred").read_bytes()).decode()
                secret = {"metadata": {"name": SECRET}, "data": {"credential": credential}}
                await admin.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", secret)
                yield Cluster(plane, admin, kubelet, scene)


async def pods(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Pods of a real API server: how soon they come and go, and under kills of it and of the leaders.

    Without the binaries that `KUBEBUILDER_ASSETS` names there are no figures.
    """
    try:
        assets()
    except FileNotFoundError as error:
        say(str(error))
        return
    async with open_cluster() as cluster:
        await _cycle(cluster, options, sheet)
        await _kills(cluster, options, sheet)


async def _cycle(cluster: Cluster, options: argparse.Namespace, sheet: FaultSheet) -> None:
    scene = cluster.scene
    placed, beyond, back = list[float](), list[float](), list[float]()
    for number in range(options.rounds):
        asked = time.time()
        name = (await scene.mesh.client.submit(job(f"pods-{number}", stages=STAGES, steps=2))).job
        first = 0.0
        async for event in scene.mesh.client.events(name):
            if event.result is not None and not first:
                first = event.at
        record = await scene.ended(name)
        none = await scene.history.until_none()
        machines = scene.history.of(name)
        placed.append(max(states[MachineState.STARTING].since for states in machines) - asked)
        beyond.append(first - max(states[MachineState.JOINED].since for states in machines))
        back.append(none - record.changed_at - IDLE_S)
    plan = Plan(section="pods")
    sheet.add(
        plan.at_most("placed, worst", max(placed), "s", 1.0, spread(placed, unit=" s")),
        plan.at_most("first step beyond the agents' start, worst", max(beyond), "s", 3.0, spread(beyond)),
        plan.at_most("back to none beyond idle_s, worst", max(back), "s", 2.0, spread(back, unit=" s")),
    )


async def _kills(cluster: Cluster, options: argparse.Namespace, sheet: FaultSheet) -> None:
    scene, random_ = cluster.scene, random.Random(options.seed)
    kills = {
        "provisioner": scene.kill_provisioner,
        "orchestrator": scene.kill_orchestrator,
        "API server": cluster.kill_api_server,
    }
    hits, jobs = Counter[str](), 0
    before, began = scene.history.ordered, len(cluster.kubelet.began)
    while hits.total() < options.kills:
        jobs += 1
        spec = job(f"pod-kills-{jobs}", stages=STAGES, steps=10, pad_ms=10)
        whole = asyncio.create_task(_to_none(scene, (await scene.mesh.client.submit(spec)).job))
        try:
            while not whole.done() and hits.total() < options.kills:
                await asyncio.wait({whole}, timeout=random_.uniform(*PAUSES_S))
                if not whole.done():
                    who = random_.choice(sorted(kills))
                    await kills[who]()
                    hits[who] += 1
            await whole
        finally:
            whole.cancel()
        say(f"job {jobs}: {hits.total()} kills, {scene.history.ordered - before} machines")
    machines = Counter(name.rpartition("-")[0] for name in cluster.kubelet.began[began:])
    of_each = ", ".join(f"{count} of the {name}" for name, count in sorted(hits.items()))
    plan = Plan(section="pods", seed=options.seed, fired=hits.total())
    ordered = scene.history.ordered - before
    sheet.add(
        plan.at_most("machines ordered twice", sum(count > 1 for count in machines.values()), "", 0, of_each),
        plan.at_most("machines beyond those needed", ordered - STAGES * jobs, "", 0, f"{jobs} jobs"),
        plan.at_most("failures", scene.history.records[POOL].failures, "", 0),
    )


async def _to_none(scene: Scene, name: str) -> None:
    await scene.ended(name)
    await scene.history.until_none()
