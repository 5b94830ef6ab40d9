"""What a move between stages is worth: throughput before and after, beside the bound and the forecast.

    python benchmarks/rebalancing.py [--rounds 3] [--pad-ms 8] [--steps 60] [--json]

A job of two stages begins in the wrong shape: three replicas on the stage with one padded block
(`workers.models.padded`), one on the stage with two. `stage-rebalancing` runs beside it and has one of the
three change its stage. Each round is a job of its own; its weights are those of a job in which nobody moved.

    bound      microbatches/s that the slowest stage can do: min over stages Σ 1 / measured service time
    measured   microbatches/s by the median step before the move, and after its verdict
    forecast   of a step's time and of what the move costs, beside what was measured
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from own_mesh import mesh  # type: ignore[import-not-found,unused-ignore]  # beside this file

from dmsc.client.client import Client
from schemas.job import JobState
from schemas.stage_move import MoveState, StageMove

MICROBATCHES = 12
LOOK_AT = 5
"""The step after which service times are read for the bound before; the policy needs eight."""
END_S = 180.0


@dataclass(frozen=True)
class Round:
    """Microbatches per second, and the move's own account."""

    bound_before: float
    before: float
    bound_after: float
    after: float
    move: StageMove


def spec(*, rebalance: bool, pad_ms: float, steps: int) -> dict[str, Any]:
    return {
        "name": "rebalanced" if rebalance else "as-it-is",
        "model": {
            "factory": "workers.models.padded:padded_gpt",
            "args": {"layers": 3, "width": 64, "heads": 4, "context": 32, "pad_ms": pad_ms},
        },
        "data": {"source": "stdlib:", "sample_tokens": 32},
        "training": {
            "steps": steps,
            "microbatches": MICROBATCHES,
            "microbatch_samples": 1,
            "validation_microbatches": 0,
            "checkpoint_every": 0,
        },
        "parallel": {"stages": 2, "replicas": [3, 1], "segmentation": "uniform", "rebalance": rebalance},
    }


def bound(client: Client, job: str) -> float:
    """Microbatches per second of the slowest stage, by what its instances measure now."""
    speeds: dict[int, float] = {}
    for entry in client.load(job).entries:
        if entry.stage >= 0 and entry.service_ms > 0:
            speeds[entry.stage] = speeds.get(entry.stage, 0.0) + 1e3 / entry.service_ms
    return min(speeds.values())


def moved(client: Client, arguments: argparse.Namespace) -> tuple[Round, str]:
    """One job with a move in it; its figures, and the SHA-256 of its weights."""
    job = client.submit(spec(rebalance=True, pad_ms=arguments.pad_ms, steps=arguments.steps)).job
    bound_before = bound_after = 0.0
    move: StageMove | None = None
    for event in client.events(job):
        if event.result is not None and event.result.step == LOOK_AT:
            bound_before = bound(client, job)
        if event.move is not None and event.move.state in (MoveState.BETTER, MoveState.NO_BETTER):
            move = move or event.move
            bound_after = bound_after or bound(client, job)
    digest = weights(client, job)
    if move is None or move.before_s is None or move.after_s is None:
        raise SystemExit(f"{job}: no move was made and judged")
    found = Round(
        bound_before=bound_before,
        before=MICROBATCHES / move.before_s,
        bound_after=bound_after,
        after=MICROBATCHES / move.after_s,
        move=move,
    )
    return found, digest


def weights(client: Client, job: str) -> str:
    record = client.wait(job, timeout_s=END_S)
    if record.state is not JobState.DONE or record.weights is None:
        raise SystemExit(f"{job} ended as {record.state}: {record.reason}")
    return record.weights.sha256


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pad-ms", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-") as name, mesh(Path(name)) as state:
        client = Client(state=state)
        command = [sys.executable, "-m", "dmsc", "policy", "run", "stage-rebalancing"]
        policy = subprocess.Popen([*command, "--state", str(state)], stderr=subprocess.DEVNULL)
        try:
            plain = client.submit(spec(rebalance=False, pad_ms=0.0, steps=arguments.steps)).job
            digests = {weights(client, plain)}
            for number in range(arguments.rounds):
                found, digest = moved(client, arguments)
                digests.add(digest)
                rounds.append(found)
                text = f"round {number + 1}: {found.before:.1f} → {found.after:.1f} microbatches/s"
                print(text, file=sys.stderr)
        finally:
            policy.terminate()
            policy.wait()
            client.close()
    if arguments.json:
        told = [{**asdict(one), "move": one.move.model_dump(mode="json")} for one in rounds]
        print(json.dumps({"rounds": told, "different_weights": len(digests)}, indent=2))
        return
    moves = [one.move for one in rounds]
    forecasts = [move.forecast for move in moves if move.forecast is not None]
    print("microbatches/s        measured                 bound")
    before, bound_before = [one.before for one in rounds], [one.bound_before for one in rounds]
    after, bound_after = [one.after for one in rounds], [one.bound_after for one in rounds]
    print(f"before                {spread(before, 1):24} {spread(bound_before, 1)}")
    print(f"after                 {spread(after, 1):24} {spread(bound_after, 1)}")
    print(f"gain                  {spread([r.after / r.before for r in rounds], 2)}×")
    print("a move                forecast                 measured")
    print(
        f"step after it, s      {spread([one.step_after_s for one in forecasts], 3):24} "
        f"{spread([move.after_s or 0.0 for move in moves], 3)}"
    )
    print(
        f"cost, s               {spread([one.cost_s for one in forecasts], 2):24} "
        f"{spread([move.cost_s or 0.0 for move in moves], 2)}"
    )
    print(f"different weights in {len(rounds)} jobs with a move and 1 without: {len(digests)}")


if __name__ == "__main__":
    main()
