"""A whole mesh, as `dmsc up` starts it: nats-server, entities, two clusters, real processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dmsc.client.client import Client
from schemas.job import JobRecord, JobSpec
from tests.patience import PATIENCE_S
from tests.warm_processes import WarmProcess, incubator, start_module

USER_MODELS = Path(__file__).parent / "user_models"
"""On every mesh's code path, as a user would put a folder of their own there."""


@dataclass(frozen=True)
class Mesh:
    """A running mesh: its state folder, its bus, and a client at its door."""

    state: Path
    servers: list[str]
    bus_token: str | None
    client: Client
    process: WarmProcess


def start_mesh(state: Path, *options: str) -> Mesh:
    """`dmsc up` with free ports; returns once it is ready."""
    arguments = ("up", "--state", str(state), "--nats-port", "0", "--http-port", "0")
    for folder in (state.parents[1], Path(argparse.__file__).parent):  # what disturbs a model; what it learns
        arguments += ("--allow-url", str(folder))
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


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One mesh for all tests that leave it as they found it: clusters a and b, six slots each."""
    running = start_mesh(tmp_path_factory.mktemp("mesh") / "state", "--slots", "6")
    try:
        yield running
    finally:
        stop_mesh(running)


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
    for section, values in sections.items():
        job[section] = {**job[section], **values} if isinstance(job.get(section), dict) else values
    return JobSpec.model_validate(job)


def padded(spec: JobSpec, pad_ms: float) -> JobSpec:
    """The same job on emulated devices: each pass of a block waits for so long (backward twice), so that it
    lasts without keeping the cores from whatever is tested. The weights are the same."""
    args = {**spec.model.args, "pad_ms": pad_ms}
    model = spec.model.model_copy(update={"factory": "workers.models.padded:padded_gpt", "args": args})
    return spec.model_copy(update={"model": model})


def outcome(client: Client, spec: JobSpec) -> JobRecord:
    """Submits a job; its record once it has ended, well or not."""
    return client.wait(client.submit(spec).job, timeout_s=PATIENCE_S)


def losses(client: Client, job: str) -> list[float]:
    """The committed loss of every step, in order; a step that was rolled back counts as run last."""
    found: dict[int, float] = {}
    for event in client.events(job):
        if event.kind == "step" and event.result is not None:
            found[event.result.step] = event.result.loss
    return [found[step] for step in sorted(found)]


def _children_of(pid: int) -> list[int]:
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
    found = {pid, *_children_of(pid)}
    for server, line in _command_lines().items():
        _, named, agent = line.partition(" workers.process.fork_server ")[2].partition("--agent ")
        if named and int(agent.split()[0]) in found:
            found |= {server, *_children_of(server)}
    return {each: line for each, line in _command_lines().items() if each in found}


def _command_lines() -> dict[int, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found
