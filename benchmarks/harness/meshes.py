"""Meshes of a benchmark's own, on free ports, gone afterwards."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import DMSC
from bus.connection import Bus
from dmsc.client.async_client import AsyncClient
from dmsc.launch.mesh import RunningMesh, running_mesh
from dmsc.launch.mesh_options import MeshOptions
from dmsc.process.composition import node_name
from dmsc.state.settings import find_bus
from schemas.envelope import EntityKind


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def mesh(
    folder: Path | None = None, *options: str, slots: int = 3, environment: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A mesh that the benchmark looks at from outside, as a user would; yields its state folder.

    Args:
        folder: Where its state folder is. None: in a new one.
        options: More options of `dmsc up`.
        slots: The slots of each of its nodes.
        environment: Variables for its processes, beside those of this one.
    """
    if folder is None:
        with new_folder() as folder, mesh(folder, *options, slots=slots, environment=environment) as state:
            yield state
        return
    state = folder / "state"
    ports = ("--nats-port", "0", "--http-port", "0", "--slots", str(slots), "--detach")
    start = [*DMSC, "up", "--allow-url", "*", "--state", str(state), *ports, *options]
    env = {**os.environ, **(environment or {})}
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=env)
    try:
        yield state
    finally:
        stop = [*DMSC, "down", "--state", str(state)]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, cwd=folder)


@dataclass(frozen=True)
class BenchMesh:
    """A mesh that runs in the benchmark's own event loop, with a client and a connection to its bus."""

    folder: Path
    running: RunningMesh
    client: AsyncClient
    bus: Bus


@asynccontextmanager
async def open_mesh(
    *clusters: str,
    slots: int = 4,
    kind: EntityKind = EntityKind.CLIENT,
    tell: Callable[[str], None] = lambda text: None,
    folder: Path | None = None,
    **options: Any,
) -> AsyncIterator[BenchMesh]:
    """Start a mesh, and stop it when the block ends.

    Args:
        clusters: Its clusters; by default those of `dmsc up`.
        slots: The slots of each of its nodes.
        kind: What the connection to the bus is.
        tell: Gets lines about ports and children that died.
        folder: For the mesh, and whatever the benchmark needs. None: a new one.
        options: More of `MeshOptions`; no module runs unless `policies` names it.
    """
    async with AsyncExitStack() as stack:
        folder = folder or stack.enter_context(new_folder())
        if clusters:
            options["clusters"] = clusters
        options.setdefault("policies", ())
        started = MeshOptions(
            state=folder / "state",
            nats_port=0,
            http_port=0,
            slots=slots,
            node=node_name(),
            allow_urls=("*",),
            **options,
        )
        running = await stack.enter_async_context(running_mesh(started, tell))
        address = find_bus(state=running.folder.path)
        client = await stack.enter_async_context(AsyncClient(state=running.folder.path))
        bus = await stack.enter_async_context(
            Bus.connect(address.servers, name="bench", kind=kind, token=address.token)
        )
        yield BenchMesh(folder, running, client, bus)
