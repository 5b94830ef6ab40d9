"""A mesh without slots, a provisioner that may be killed, and all that was ever written of its machines."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness.command import say
from benchmarks.harness.jobs import done
from benchmarks.harness.jobs import job as job_body
from benchmarks.harness.meshes import BenchMesh, open_mesh
from benchmarks.harness.processes import DMSC
from bus import subjects
from bus.messaging.key_value import Change
from dmsc.chaos.processes import LocalMesh, ProcessHandle
from schemas.envelope import EntityKind
from schemas.job import JobRecord, JobSpec
from schemas.leadership import Leadership
from schemas.machines.records import Machine, MachineState, PoolRecord

CLUSTER = "a"
READY = "provisioner ready"
STARTED = '"event": "metrics"'
"""In a node agent's log once for each start of it."""


def job(name: str, *, stages: int, steps: int, pad_ms: float | None = None, **rest: Any) -> JobSpec:
    """A small job of one slot for each stage."""
    body = job_body(
        name, steps=steps, layers=max(stages, 2), width=32, heads=2, stages=stages, pad_ms=pad_ms, **rest
    )
    return JobSpec.model_validate(body)


@dataclass
class MachineHistory:
    """What was written of the pools' machines, by whoever led."""

    records: dict[str, PoolRecord] = field(default_factory=dict)
    machines: dict[str, dict[MachineState, Machine]] = field(default_factory=dict)
    """By its name: each machine as it was when it came into a state."""
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def written(self, change: Change) -> None:
        record = change.message
        if not isinstance(record, PoolRecord):
            return
        self.records[record.pool] = record
        for machine in (*record.machines, *record.ended):
            self.machines.setdefault(machine.id, {}).setdefault(machine.state, machine)
        async with self.news:
            self.news.notify_all()

    @property
    def ordered(self) -> int:
        """How many names were ever ordered."""
        return sum(record.number for record in self.records.values())

    def of(self, name: str) -> list[dict[MachineState, Machine]]:
        """The machines that were ordered for a job."""
        return [
            states for states in self.machines.values() if name in {m.ordered_for for m in states.values()}
        ]

    async def until_none(self) -> float:
        """Returns once no machine is left, with the time at which the last one ended."""
        async with self.news:
            await self.news.wait_for(lambda: not any(each.machines for each in self.records.values()))
        ended = [each.ended_at or 0.0 for record in self.records.values() for each in record.ended]
        return max(ended, default=0.0)


@dataclass
class Scene:
    """A mesh with its provisioner."""

    mesh: BenchMesh
    history: MachineHistory
    command: list[str]
    terms: asyncio.Queue[int]
    """Terms of orchestrators, each as it begins."""
    process: asyncio.subprocess.Process | None = None
    starts: int = 0

    @property
    def state(self) -> Path:
        return self.mesh.running.folder.path

    @property
    def _log(self) -> Path:
        return self.mesh.folder / "provisioner.log"

    async def start_provisioner(self) -> None:
        """Returns once it leads."""
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, cwd=self.mesh.folder, stdout=log, stderr=log
            )
        self.starts += 1
        while self._log.read_text(errors="replace").count(READY) < self.starts:
            if self.process.returncode is not None:
                raise SystemExit(f"the provisioner ended: {self._log.read_text()[-500:]}")
            await asyncio.sleep(0.02)

    async def stop_provisioner(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
            await self.process.wait()

    async def kill_provisioner(self) -> None:
        """Kills it, and returns once the next one leads."""
        assert self.process is not None
        self.process.kill()
        await self.process.wait()
        await self.start_provisioner()

    async def kill_orchestrator(self) -> None:
        """Kills it, and returns once the one that the mesh starts instead leads."""
        (part,) = [
            part
            for part in LocalMesh(self.mesh.running.folder).alive("", ()).parts
            if "orchestrator" in part.entities
        ]
        while not self.terms.empty():
            self.terms.get_nowait()
        handle = ProcessHandle(part.pid, part.started)
        try:
            handle.signal(signal.SIGKILL)
        finally:
            handle.close()
        await self.terms.get()

    async def ended(self, name: str) -> JobRecord:
        """The record of a job that has ended well."""
        return done(await self.mesh.client.wait(name))

    def process_starts(self, pool: str, machine: str) -> int:
        """How often a machine's process was started."""
        log = self.state / "machines" / pool / f"{machine}.log"
        return log.read_text(errors="replace").count(STARTED) if log.exists() else 0


@asynccontextmanager
async def open_scene(pools: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[Scene]:
    """A mesh whose own node has no slot, with a provisioner that leads; no machine stays.

    Args:
        pools: by name, what is to be other than: one slot, one machine, given back after a second.
    """
    kind = EntityKind.PROVISIONER  # it may read what provisioners write
    async with open_mesh(CLUSTER, slots=0, separate=True, kind=kind, tell=say) as mesh:
        state, folder = mesh.running.folder.path, mesh.folder
        credential = str(folder / "a.cred")
        make = ["credential", "agent", "--cluster", CLUSTER, "-o", credential, "--state", str(state)]
        await asyncio.to_thread(subprocess.run, [*DMSC, *make], check=True, stdout=subprocess.DEVNULL)
        rules = {
            name: {
                "driver": "local",
                "cluster": CLUSTER,
                "credential": "a.cred",
                "most": 1,
                "idle_s": 1.0,
                "options": ["--allow-url", "*"],
                **rules,
            }
            for name, rules in pools.items()
        }
        (folder / "pools.yaml").write_text(yaml.safe_dump({"name": "bench", "pools": rules}))
        run = ["run", "provisioner", "--pools", str(folder / "pools.yaml"), "--state", str(state)]
        scene = Scene(mesh, MachineHistory(), [*DMSC, *run], asyncio.Queue())

        term = 0

        async def leads(change: Change) -> None:
            nonlocal term
            lease = change.message
            if isinstance(lease, Leadership) and lease.term > term:
                scene.terms.put_nowait(term := lease.term)

        leaders = await mesh.bus.bucket(subjects.LEADERSHIP).watch(leads, role="orchestrator")
        watch = await mesh.bus.bucket(subjects.MACHINE_POOL).watch(scene.history.written)
        try:
            await scene.start_provisioner()
            yield scene
            await scene.history.until_none()
        finally:
            await watch.stop()
            await leaders.stop()
            await scene.stop_provisioner()
