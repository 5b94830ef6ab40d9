"""A whole mesh, as `dmsc up` starts it: nats-server, entities, two clusters, real processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bus.connection import Bus
from dmsc.client.client import Client
from schemas.envelope import EntityKind
from schemas.job import JobRecord, JobSpec, JobState
from schemas.registry import ServiceRecord
from tests.integration.dmsc.command_line import dmsc
from tests.integration.mesh.own_mesh import USER_MODELS, OwnMesh, Witness
from tests.integration.mesh.user_jobs import with_sections, words
from tests.patience import PATIENCE_S
from tests.warm_processes import WarmProcess, incubator, start_module


@dataclass(frozen=True)
class Mesh:
    """A running mesh: its state folder, its bus, and a client at its door."""

    state: Path
    servers: list[str]
    bus_token: str | None
    client: Client
    process: WarmProcess

    @property
    def token(self) -> str:
        """Of the administrator, the one user who may publish anywhere."""
        return (self.state / "token").read_text().strip()

    @property
    def children(self) -> dict[str, int]:
        """The pids of its processes by their names."""
        found: dict[str, int] = json.loads((self.state / "mesh.json").read_text())["children"]
        return found

    def bus(
        self, name: str, kind: EntityKind = EntityKind.CLIENT, **options: Any
    ) -> AbstractAsyncContextManager[Bus]:
        """A connection; with the mesh's root where `options` name no other token."""
        return Bus.connect(self.servers, name=name, kind=kind, **{"token": self.bus_token, **options})

    def dmsc(self, *arguments: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """A command against this mesh."""
        return dmsc(*arguments, "--state", str(self.state), cwd=cwd or self.state.parent, **more)

    def printed(self, *arguments: str, cwd: Path | None = None, **more: str) -> str:
        """What a command prints that succeeds."""
        done = self.dmsc(*arguments, cwd=cwd, **more)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr}"
        return done.stdout

    def instance(self, sid: str) -> ServiceRecord:
        """The registry's record of an instance that is there."""
        services = self.client.mesh().services
        found = [one for one in services if one.sid == sid and one.kind is EntityKind.INSTANCE]
        assert found, f"{sid} is not registered"
        return found[0]


def start_mesh(state: Path, *options: str) -> Mesh:
    """`dmsc up` with free ports; returns once it is ready. No module runs unless `options` name it."""
    arguments = ("up", "--state", str(state), "--nats-port", "0", "--http-port", "0")
    for folder in (state.parents[1], Path(argparse.__file__).parent):  # what disturbs a model; what it learns
        arguments += ("--allow-url", str(folder))
    if "--policy" not in options:
        arguments += ("--policy", "none", "--automation", "act")
    arguments += options
    environment = {
        **os.environ,
        **incubator(),
        "DMSC_CODE_PATH": str(USER_MODELS),
        "DMSC_PEAK_TFLOPS": "0.1",
        "DMSC_ENERGY_PRICE": "0.3",
    }
    said = state.with_name(f"{state.name}.stderr")
    process = start_module(
        "dmsc", arguments, cwd=Path(), environment=environment, out=Path(os.devnull), err=said
    )
    deadline = time.monotonic() + PATIENCE_S
    found: dict[str, Any] = {}
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"dmsc up ended with {process.returncode}: {said.read_text()[-2000:]}")
        file = state / "mesh.json"
        if file.exists():
            found = json.loads(file.read_text() or "{}")
            if found.get("ready_at") and found["pid"] == process.pid:  # one that was killed leaves its own
                break
        time.sleep(0.05)
    else:
        process.kill()
        pytest.fail(f"the mesh was not ready after {PATIENCE_S:.0f} s")
    token_file = state / "bus_token"
    return Mesh(
        state=state,
        servers=found["servers"],
        bus_token=token_file.read_text().strip() if token_file.exists() else None,
        client=Client(state=state),
        process=process,
    )


def stop_mesh(mesh: Mesh) -> int:
    """Ctrl-C; returns the exit code."""
    mesh.client.close()
    mesh.process.send_signal(signal.SIGINT)
    try:
        return mesh.process.wait(PATIENCE_S)
    finally:
        if mesh.process.poll() is None:
            mesh.process.kill()


@contextlib.contextmanager
def running_mesh(state: Path, *options: str) -> Iterator[Mesh]:
    """A mesh until the end of the block, which it ends in order."""
    mesh = start_mesh(state, *options)
    try:
        yield mesh
    finally:
        assert stop_mesh(mesh) == 0


class SharedMesh:
    """One mesh for all modules that leave it as they found it: clusters a and b, six slots each.

    It costs 2.5 CPU seconds to start, and a 25th of a core while it is there: so it ends before a module that
    has a mesh of its own, and those come last (`pytest_collection_modifyitems`).
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._mesh: Mesh | None = None

    def running(self) -> Mesh:
        if self._mesh is None:
            self._mesh = start_mesh(self._folders.mktemp("mesh") / "state", "--slots", "6")
        return self._mesh

    def stop(self) -> None:
        running, self._mesh = self._mesh, None
        if running is not None:
            stop_mesh(running)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of this folder that need the shared mesh come before those that do not, in their order."""
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    here = [items[place] for place in places]
    sharing = {item.path for item in here if needs_shared_mesh(item)}
    here.sort(key=lambda item: item.path not in sharing)
    for place, item in zip(places, here, strict=True):
        items[place] = item


def needs_shared_mesh(item: pytest.Item) -> bool:
    return "mesh" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="package")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedMesh]:
    shared = SharedMesh(tmp_path_factory)
    try:
        yield shared
    finally:
        shared.stop()


@pytest.fixture(scope="module")
def mesh(shared_mesh: SharedMesh) -> Mesh:
    return shared_mesh.running()


@pytest.fixture(scope="module", autouse=True)
def _no_mesh_beside_ones_own(request: pytest.FixtureRequest, shared_mesh: SharedMesh) -> None:
    module = request.path
    if not any(item.path == module and needs_shared_mesh(item) for item in request.session.items):
        shared_mesh.stop()


@pytest_asyncio.fixture
async def witness(own: OwnMesh) -> AsyncIterator[Witness]:
    """A client of the module's own mesh; everything that an earlier test killed is there again."""
    for name in own.commands.keys() - own.alive().keys():
        own.start(name)
    async with own.client() as client:
        await client.ready()
        yield client


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of jobs of users' models."""
    return words(tmp_path_factory.mktemp("data"))


def tiny_job(name: str = "tiny", **sections: Any) -> JobSpec:
    """A job of milliseconds per step: two blocks of width 32, dropout on, four microbatches, and one module
    of the standard library to learn, which is mapped rather than read.

    Sections are laid over its own, key by key; any other value takes its place.
    """
    job: dict[str, Any] = {
        "name": name,
        "model": {
            "factory": "workers.models.gpt:byte_gpt",
            "args": {"layers": 2, "width": 32, "heads": 2, "context": 32, "dropout": 0.1},
        },
        "data": {"source": f"file://{argparse.__file__}", "sample_tokens": 32, "validation_fraction": 0.05},
        "training": {
            "steps": 8,
            "microbatches": 4,
            "microbatch_samples": 2,
            "seed": 7,
            "schedule": {"warmup_steps": 3},
            "checkpoint_every": 0,
            "validation_microbatches": 1,
        },
        "parallel": {"stages": 1, "replicas": 1},
    }
    return with_sections(job, sections)


def gated_job(
    name: str, gate: Path, training: Mapping[str, Any], parallel: Mapping[str, Any], **sections: Any
) -> JobSpec:
    """A job of `user_models/gated.py`, whose passes are held at the gate."""
    return tiny_job(
        name,
        model={"factory": "gated:gated", "args": {"gate": str(gate)}},
        training={"validation_microbatches": 0, **training},
        parallel=parallel,
        **sections,
    )


PADDED = "workers.models.padded:padded_gpt"


def padded(spec: JobSpec, pad_ms: float, factory: str = PADDED, **more: Any) -> JobSpec:
    """The same job on emulated devices: each pass of a block waits for so long (backward twice), so that it
    lasts without keeping the cores from whatever is tested. The weights are the same."""
    args = {**spec.model.args, "pad_ms": pad_ms, **more}
    model = spec.model.model_copy(update={"factory": factory, "args": args})
    return spec.model_copy(update={"model": model})


def outcome(client: Client, spec: JobSpec) -> JobRecord:
    """Submits a job; its record once it has ended, well or not."""
    return client.wait(client.submit(spec).job, timeout_s=PATIENCE_S)


def done(client: Client, job: str) -> JobRecord:
    """The record of a job that ends well."""
    record = client.wait(job, timeout_s=PATIENCE_S)
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    return record


def until_step(client: Client, job: str, step: int) -> None:
    """Returns once a step is committed."""
    for event in client.events(job):
        if event.result is not None and event.result.step >= step:
            return
    pytest.fail(f"{job} ended before step {step}: {client.job(job).reason}")


def losses(client: Client, job: str) -> list[float]:
    """The committed loss of every step, in order; a step that was rolled back counts as run last."""
    found: dict[int, float] = {}
    for event in client.events(job):
        if event.kind == "step" and event.result is not None:
            found[event.result.step] = event.result.loss
    return [found[step] for step in sorted(found)]


def children_of(pid: int) -> list[int]:
    """All descendants of a process, by /proc."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(entry)] = int(fields[1])
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        mine = [child for child, its in parents.items() if its == parent]
        found += mine
        pending += mine
    return found


def processes_of(pid: int) -> dict[int, str]:
    """The command lines of a mesh's process and all below it, and of the fork servers that its agents had
    forked for them elsewhere, which name the agent, and all below these."""
    found = {pid, *children_of(pid)}
    for server, line in _command_lines().items():
        _, named, agent = line.partition(" workers.process.fork_server ")[2].partition("--agent ")
        if named and int(agent.split()[0]) in found:
            found |= {server, *children_of(server)}
    return {each: line for each, line in _command_lines().items() if each in found}


def _command_lines() -> dict[int, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found
