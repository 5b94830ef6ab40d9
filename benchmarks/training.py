"""Training throughput: the mesh against torch's own pipeline (1F1B) and against DDP, interleaved.

    python benchmarks/training.py [--rounds 3] [--steps 6] [--json]

Four runs per round, in turn, on the same machine: the mesh with 2 stages × 1 replica and `Schedule1F1B` with
the same cut; the mesh with 1 stage × 2 replicas and DDP. Each has two processes that compute, one thread
each, the same model, microbatches, optimizer and clipping (`peers.py`). Every other round runs in reverse
order, so that a machine that slows down favours nobody. Reported are tokens/s and, per round, the ratio of
the medians of the step times; the spread over rounds stands beside it.

The mesh's side includes what it always does: data instance, claims, telemetry, the step transaction, and
exact gradient sums (`--float-sums` turns those off). The peers read no data and record nothing.

On a machine with as many cores as computing processes, all that the mesh does beside computing (server,
control plane, data instance) is taken from the computing. `--pad-ms 8 --microbatch-samples 1` emulates
devices of their own instead: each block of the model also waits 8 ms forward and 16 ms backward, with the
peers as well (`workers/models/padded.py`), so that a microbatch takes some 100 ms per stage and the cores
are mostly free.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dmsc import Client
from schemas.job import JobRecord, JobState

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAIRS = (("mesh 2×1", "1F1B"), ("mesh 1×2", "DDP"))
RANKS = 2
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work, as both sides get it. About 5 million parameters; some 200 ms per microbatch and stage."""

    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 128
    microbatches: int = 8
    microbatch_samples: int = 8
    warmup: int = 2
    steps: int = 6
    pad_ms: float = 0.0  # each block waits this long forward, twice that backward: an emulated device
    cut: int = 4  # layers of the first stage; taken from the mesh's own plan once there is one

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.microbatch_samples * self.context

    def spec(self, stages: int, replicas: int, data: Path, *, exact: bool) -> dict[str, Any]:
        """The same as a job file."""
        sizes: dict[str, Any] = {
            "layers": self.layers,
            "width": self.width,
            "heads": self.heads,
            "context": self.context,
        }
        factory, args = "workers.models.gpt:byte_gpt", sizes
        if self.pad_ms:
            factory, args = "workers.models.padded:padded_gpt", {**sizes, "pad_ms": self.pad_ms}
        return {
            "name": f"bench-{stages}x{replicas}",
            "model": {"factory": factory, "args": args},
            "data": {"source": data.as_uri(), "sample_tokens": self.context, "validation_fraction": 0.01},
            "training": {
                "steps": self.warmup + self.steps,
                "microbatches": self.microbatches,
                "microbatch_samples": self.microbatch_samples,
                "optimizer": {"lr": 1e-3},
                "clip_norm": 1.0,
                "exact_accumulation": exact,
                "validation_microbatches": 0,
                "checkpoint_every": 0,
            },
            "parallel": {"stages": stages, "replicas": replicas},
        }


@dataclass(kw_only=True)
class Measured:
    """Step times of one contender: one list of seconds per round."""

    rounds: list[list[float]] = field(default_factory=list)

    def median_s(self, number: int) -> float:
        return statistics.median(self.rounds[number])

    def tokens_per_s(self, job: Job) -> float:
        return job.tokens_per_step / statistics.median(step for steps in self.rounds for step in steps)


@contextmanager
def mesh(folder: Path) -> Iterator[Client]:
    """A mesh of its own, on free ports, gone afterwards."""
    state = ["--state", str(folder / "state")]
    arguments = [
        "--cluster",
        "a",
        "--slots",
        "4",
        "--nats-port",
        "0",
        "--http-port",
        "0",
        "--detach",
        "--json",
    ]
    command = [sys.executable, "-m", "dmsc"]
    subprocess.run(
        [*command, "up", "--allow-url", "*", *state, *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env=ENVIRONMENT,
        cwd=folder,
    )
    try:
        with Client(state=folder / "state") as client:
            yield client
    finally:
        subprocess.run([*command, "down", *state], check=True, stdout=subprocess.DEVNULL, cwd=folder)


def run_job(client: Client, job: Job, spec: dict[str, Any]) -> tuple[list[float], JobRecord]:
    """Seconds of each step after the warm-up, from decision to decision, and the job's record."""
    taken = []
    submitted = client.submit(spec)
    for event in client.events(submitted.job):
        if event.kind == "step" and event.result is not None and event.result.step >= job.warmup:
            taken.append(event.result.step_s)
    record = client.job(submitted.job)
    if record.state is not JobState.DONE or len(taken) != job.steps:
        sys.exit(
            f"{record.job} ended {record.state.value} after {len(taken)} measured steps: {record.reason}"
        )
    return taken, record


def run_peer(peer: str, job: Job, folder: Path) -> list[float]:
    """The same from a peer: its ranks are started, meet at a file, and end."""
    workload = {name: getattr(job, name) for name in job.__dataclass_fields__}
    with tempfile.TemporaryDirectory(dir=folder) as meeting:
        command = [sys.executable, str(HERE / "peers.py"), peer, "--world", str(RANKS)]
        command += ["--meeting", str(Path(meeting) / "ranks"), "--workload", json.dumps(workload)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            printed = [rank.communicate(timeout=300)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(rank.returncode for rank in ranks):
            sys.exit(f"{peer}: a rank ended with {[rank.returncode for rank in ranks]}")
    taken: list[float] = json.loads(printed[-1])["step_s"]
    return taken


def measure(job: Job, rounds: int, *, exact: bool) -> tuple[Job, dict[str, Measured]]:
    """Runs all contenders `rounds` times, in turn."""
    found = {name: Measured() for pair in PAIRS for name in pair}
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-") as name:
        folder = Path(name)
        data = folder / "data.bin"
        data.write_bytes(random.Random(0).randbytes(1 << 21))
        with mesh(folder) as client:
            for number in range(rounds):
                order = [name for pair in PAIRS for name in pair]
                for contender in reversed(order) if number % 2 else order:
                    if contender == "mesh 2×1":
                        taken, record = run_job(client, job, job.spec(2, 1, data, exact=exact))
                        assert record.graph is not None
                        job = replace(job, cut=record.graph.stage(0)[0].last_layer)
                    elif contender == "mesh 1×2":
                        taken, _ = run_job(client, job, job.spec(1, 2, data, exact=exact))
                    else:
                        taken = run_peer("pipeline" if contender == "1F1B" else "ddp", job, folder)
                    found[contender].rounds.append(taken)
                    print(
                        f"round {number + 1}/{rounds}  {contender:9} {statistics.median(taken):.3f} s/step",
                        file=sys.stderr,
                        flush=True,
                    )
    return job, found


def summary(job: Job, found: dict[str, Measured]) -> dict[str, Any]:
    """Tokens per second of each, and the ratios with their spread."""
    ratios = {}
    for ours, theirs in PAIRS:
        per_round = [
            found[theirs].median_s(number) / found[ours].median_s(number)
            for number in range(len(found[ours].rounds))
        ]
        ratios[f"{ours} / {theirs}"] = {
            "median": round(statistics.median(per_round), 3),
            "lowest": round(min(per_round), 3),
            "highest": round(max(per_round), 3),
        }
    return {
        "job": {name: getattr(job, name) for name in job.__dataclass_fields__},
        "tokens_per_s": {name: round(measured.tokens_per_s(job)) for name, measured in found.items()},
        "step_s": {name: measured.rounds for name, measured in found.items()},
        "ratios": ratios,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps per run")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-samples", type=int, default=8)
    parser.add_argument("--pad-ms", type=float, default=0.0, help="wait per block: emulates devices")
    parser.add_argument("--float-sums", action="store_true", help="plain fp32 gradient sums in the mesh")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    job = Job(
        steps=arguments.steps,
        microbatches=arguments.microbatches,
        microbatch_samples=arguments.microbatch_samples,
        pad_ms=arguments.pad_ms,
    )
    job, found = measure(job, arguments.rounds, exact=not arguments.float_sums)
    result = summary(job, found)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, rate in result["tokens_per_s"].items():
        print(f"{name:22} {rate:>8} tokens/s")
    for name, ratio in result["ratios"].items():
        print(f"{name:22} {ratio['median']:>8.3f}×   {ratio['lowest']:.3f} to {ratio['highest']:.3f}")


if __name__ == "__main__":
    main()
