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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.jobs import done, step_times
from benchmarks.harness.jobs import job as job_spec
from benchmarks.harness.meshes import mesh, new_folder
from benchmarks.harness.processes import turns
from dmsc import Client
from schemas.job import JobRecord

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAIRS = (("mesh 2×1", "1F1B"), ("mesh 1×2", "DDP"))
RANKS = 2
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


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
        spec = job_spec(
            f"bench-{stages}x{replicas}",
            steps=self.warmup + self.steps,
            microbatches=self.microbatches,
            samples=self.microbatch_samples,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            context=self.context,
            pad_ms=self.pad_ms or None,
            source=data,
            training={"optimizer": {"lr": 1e-3}, "clip_norm": 1.0, "exact_accumulation": exact},
            stages=stages,
            replicas=replicas,
        )
        spec["data"]["validation_fraction"] = 0.01
        return spec


@dataclass(kw_only=True)
class Measured:
    """Step times of one contender: one list of seconds per round."""

    rounds: list[list[float]] = field(default_factory=list)

    def median_s(self, number: int) -> float:
        return statistics.median(self.rounds[number])

    def tokens_per_s(self, job: Job) -> float:
        return job.tokens_per_step / statistics.median(step for steps in self.rounds for step in steps)


def run_job(client: Client, job: Job, spec: dict[str, Any]) -> tuple[list[float], JobRecord]:
    """Seconds of each step after the warm-up, from decision to decision, and the job's record."""
    submitted = client.submit(spec).job
    taken = step_times(client, submitted)[job.warmup :]
    record = done(client.job(submitted))
    if len(taken) != job.steps:
        sys.exit(f"{record.job} ended after {len(taken)} measured steps")
    return taken, record


def run_peer(peer: str, job: Job, folder: Path) -> list[float]:
    """The same from a peer: its ranks are started, meet at a file, and end."""
    workload = asdict(job)
    with tempfile.TemporaryDirectory(dir=folder) as meeting:
        command = [sys.executable, str(HERE / "peers.py"), peer, "--world", str(RANKS)]
        command += ["--meeting", str(Path(meeting) / "ranks"), "--workload", json.dumps(workload)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs all contenders `rounds` times, in turn."""
    job = Job(
        steps=options.steps,
        microbatches=options.microbatches,
        microbatch_samples=options.microbatch_samples,
        pad_ms=options.pad_ms,
    )
    rounds, exact = options.rounds, not options.float_sums
    contenders = [name for pair in PAIRS for name in pair]
    found = {name: Measured() for name in contenders}
    with (
        new_folder() as folder,
        mesh(folder, "--cluster", "a", slots=4, environment=ONE_THREAD) as state,
        Client(state=state) as client,
    ):
        data = folder / "data.bin"
        data.write_bytes(random.Random(0).randbytes(1 << 21))
        for number, contender in turns(contenders, rounds):
            if contender == "mesh 2×1":
                taken, record = run_job(client, job, job.spec(2, 1, data, exact=exact))
                assert record.graph is not None
                job = replace(job, cut=record.graph.stage(0)[0].last_layer)
            elif contender == "mesh 1×2":
                taken, _ = run_job(client, job, job.spec(1, 2, data, exact=exact))
            else:
                taken = run_peer("pipeline" if contender == "1F1B" else "ddp", job, folder)
            found[contender].rounds.append(taken)
            say(f"round {number + 1}/{rounds}  {contender:9} {statistics.median(taken):.3f} s/step")
    return summary(job, found)


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
        "job": asdict(job),
        "tokens_per_s": {name: round(measured.tokens_per_s(job)) for name, measured in found.items()},
        "step_s": {name: measured.rounds for name, measured in found.items()},
        "ratios": ratios,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    for name, rate in result["tokens_per_s"].items():
        yield f"{name:22} {rate:>8} tokens/s"
    for name, ratio in result["ratios"].items():
        yield f"{name:22} {ratio['median']:>8.3f}×   {ratio['lowest']:.3f} to {ratio['highest']:.3f}"


if __name__ == "__main__":
    bench(
        command(
            __doc__,
            rounds=3,
            steps=(6, "measured steps per run"),
            microbatches=8,
            microbatch_samples=8,
            pad_ms=(0.0, "wait per block: emulates devices"),
            float_sums=(False, "plain fp32 gradient sums in the mesh"),
        ),
        measure,
        lines,
    )
