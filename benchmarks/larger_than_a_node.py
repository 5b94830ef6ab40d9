"""Models that no process may hold: trained by four instances, each with room for a part of the model's state.

    python -m benchmarks.larger_than_a_node [--room 0.4] [--width 896] [--only declared,llama,shards] [--json]

State: weights, AdamW's moments, and the sum of gradients, 20 bytes per parameter. A declared graph, a Llama
from a config, and a Llama from three shards of safetensors are each trained by one instance that may hold
all of it, then by four. Before that, the fork servers get a limit (RLIMIT_DATA), which what they fork
inherits: the memory that they have themselves, the part `--room` of the state, and the stacks of threads. So
an instance or an analysis that needs more fails, and with it the job.

Meanwhile the anonymous memory of every process of the mesh and of this one, which is the client, is read
every 10 ms. Of what a fork server has forked, the memory that it had itself is taken off: that is torch.
Shown is the peak of each kind of process, as a part of the state, and whether both weights have one SHA-256.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.command import bench, command, say, some_of
from benchmarks.harness.jobs import digest, job
from benchmarks.harness.meshes import mesh, new_folder
from dmsc import Client
from dmsc.state.state_folder import StateFolder
from schemas.job import JobRecord, JobState

MODELS = ("declared", "llama", "shards")
STAGES = 4
STATE_BYTES_PER_PARAMETER = 4 + 8 + 8
"""Of fp32 weights, two moments, and the int64 sum."""
LAYERS = 12
THREADS, STACK_BYTES = 40, 1 << 20
"""Threads of an instance at most, and the stack of each, which counts as data."""


@dataclass
class Peaks:
    """Peaks of anonymous memory in bytes, by kind of process."""

    state: Path
    every_s: float = 0.01
    bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        file = StateFolder(self.state).mesh()
        assert file is not None
        self._root = file.pid
        self._names = {pid: name for name, pid in file.children.items()} | {file.pid: "dmsc up"}
        self.fork_servers = {
            process.pid: anonymous(process.pid)
            for process in psutil.Process(file.pid).children(recursive=True)
            if any("fork_server" in word for word in process.cmdline())
        }

    def look(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(OSError, psutil.Error):
                name = self._kind(process)
                own = self.fork_servers.get(process.ppid(), 0)
                self.bytes[name] = max(self.bytes.get(name, 0), anonymous(process.pid) - own)

    def _kind(self, process: psutil.Process) -> str:
        if process.pid in self._names:
            return self._names[process.pid]
        if process.pid in self.fork_servers:
            return "fork server"
        if process.pid == psutil.Process().pid:
            return "client"
        if process.ppid() in self.fork_servers:
            title = " ".join(process.cmdline()[:2])
            for kind in ("analysis", "data", *(f"s{stage}" for stage in range(STAGES)), "sample"):
                if f"-{kind}" in title:
                    return f"stage {kind[1]}" if kind[0] == "s" and kind[1:].isdigit() else kind
            return "other worker"
        return "server and helpers"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Looks every `every_s` while it is open."""
        ended = threading.Event()

        def watch() -> None:
            processes: list[psutil.Process] = []
            listed_at = 0.0
            while not ended.wait(self.every_s):
                if time.monotonic() - listed_at > 5 * self.every_s:
                    listed_at = time.monotonic()
                    with contextlib.suppress(psutil.Error):
                        processes = psutil.Process(self._root).children(recursive=True)
                        processes += [psutil.Process(self._root), psutil.Process()]
                self.look(processes)

        thread = threading.Thread(target=watch)
        before = anonymous(psutil.Process().pid)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.bytes["client"] = max(0, self.bytes.get("client", 0) - before)


def anonymous(pid: int) -> int:
    return _status(pid, "RssAnon")


def _status(pid: int, name: str) -> int:
    """A line of `/proc/PID/status` that is in KiB, in bytes; 0 where a process has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def limit(pid: int, room_bytes: int) -> None:
    """What a fork server forks from now on may have `room_bytes` beyond what it has itself."""
    most = _status(pid, "VmData") + room_bytes + THREADS * STACK_BYTES
    psutil.Process(pid).rlimit(psutil.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def unlimited(pid: int) -> None:
    psutil.Process(pid).rlimit(psutil.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# --- the models -------------------------------------------------------------------------------------------
def llama_config(width: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }


_SAVE = """
import json, sys, torch, transformers
transformers.utils.logging.disable_progress_bar()
torch.manual_seed(3)
config = json.loads(sys.argv[1])
parsed = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
model = transformers.AutoModelForCausalLM.from_config(parsed)
size = sum(weight.nbytes for weight in model.parameters())
model.save_pretrained(sys.argv[2], max_shard_size=size // 3 + (4 << 20))
"""


def model_of(name: str, width: int, folder: Path) -> dict[str, Any]:
    """The parts of a job file that say which model it is; shards are made first, by another process."""
    if name == "declared":
        shutil.copy(Path(__file__).with_name("large_graph.py"), folder)
        return {"model": {"factory": "large_graph:branches", "args": {"width": width, "blocks": LAYERS // 2}}}
    config = llama_config(width)
    found: dict[str, Any] = {
        "model": {
            "factory": "workers.models.transformers_model:transformers_model",
            "args": {"config": config, "task": "causal-lm"},
        }
    }
    if name == "shards":
        saved = folder / "pretrained"
        subprocess.run([sys.executable, "-c", _SAVE, json.dumps(config), str(saved)], check=True)
        shards = len([*saved.glob("*.safetensors")])
        assert shards == 3, f"{shards} shards"
        found["initial_weights"] = str(saved)
    return found


@dataclass(frozen=True)
class LargeModel:
    """What one model showed."""

    name: str
    parameters: int
    peaks: dict[str, float]
    """Peak of each kind of process, as a part of the model's state."""
    digests: tuple[str, str]
    """Of the weights from one instance without a limit, and from four with one."""
    seconds: tuple[float, float]

    @property
    def worst(self) -> float:
        return max(self.peaks.values())

    @property
    def same(self) -> bool:
        return len(set(self.digests)) == 1


def trained(client: Client, spec: dict[str, Any]) -> tuple[JobRecord, float]:
    began = time.monotonic()
    submitted = client.submit(spec).job
    for event in client.events(submitted):
        if event.kind == "state" and event.state is JobState.PARKED:
            break  # what has no room is tried again and again, and then waits for a person
    record = client.job(submitted)
    digest(record)
    return record, time.monotonic() - began


def large_model(
    client: Client, state: Path, name: str, folder: Path, options: argparse.Namespace
) -> LargeModel:
    shape = {"steps": options.steps, "microbatches": 2, "layers": 1, "width": 8, "context": 16}
    own = model_of(name, options.width, folder)
    whole, whole_s = trained(client, job(f"whole-{name}", **shape, stages=1) | own)
    assert whole.weights is not None
    parameters = whole.weights.bytes // 4
    room_bytes = int(options.room * STATE_BYTES_PER_PARAMETER * parameters)
    peaks = Peaks(state)
    for pid in peaks.fork_servers:
        limit(pid, room_bytes)
    try:
        with peaks.watched():
            cut, cut_s = trained(client, job(f"cut-{name}", **shape, stages=STAGES) | own)
    finally:
        for pid in peaks.fork_servers:
            unlimited(pid)
    state_bytes = STATE_BYTES_PER_PARAMETER * parameters
    return LargeModel(
        name,
        parameters,
        {kind: round(size / state_bytes, 3) for kind, size in sorted(peaks.bytes.items())},
        (digest(whole), digest(cut)),
        (whole_s, cut_s),
    )


def measure(options: argparse.Namespace) -> list[LargeModel]:
    found = []
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    with (
        new_folder() as folder,
        mesh(folder, "--cluster", "a", slots=STAGES) as state,
        Client(state=state) as client,
    ):
        for name in options.only:
            found.append(large_model(client, state, name, folder, options))
            for line in lines(found[-1:]):
                say(line)
    wrong = [each.name for each in found if not each.same or each.worst > options.room]
    if wrong:
        raise SystemExit(f"other weights, or more memory than the room: {', '.join(wrong)}")
    return found


def lines(found: list[LargeModel]) -> Iterator[str]:
    for each in found:
        size = STATE_BYTES_PER_PARAMETER * each.parameters >> 20
        yield (
            f"{each.name:9} {each.parameters / 1e6:.1f} M parameters, {size} MiB of state; "
            f"{each.seconds[0]:.0f} s by one instance, {each.seconds[1]:.0f} s by {STAGES}; "
            f"SHA-256 {'equal' if each.same else 'NOT equal'}"
        )
        yield "          " + ", ".join(f"{kind} {part:.3f}" for kind, part in each.peaks.items())


if __name__ == "__main__":
    parser = command(__doc__, room=(0.4, "of the state, for each process"), width=896, steps=3)
    parser.add_argument("--only", type=some_of(MODELS), default=MODELS, help="some models, with commas")
    bench(parser, measure, lines)
