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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.figures import spread
from benchmarks.harness.jobs import digest, job
from benchmarks.harness.meshes import mesh, new_folder
from dmsc.client.client import Client
from schemas.changes import ChangeState, JobChange

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
    move: JobChange


def spec(*, rebalance: bool, pad_ms: float, steps: int) -> dict[str, Any]:
    return job(
        "rebalanced" if rebalance else "as-it-is",
        steps=steps,
        microbatches=MICROBATCHES,
        layers=3,
        width=64,
        pad_ms=pad_ms,
        parallel={"replicas": [3, 1], "segmentation": "uniform", "rebalance": rebalance},
    )


def bound(client: Client, name: str) -> float:
    """Microbatches per second of the slowest stage, by what its instances measure now."""
    speeds: dict[int, float] = {}
    for entry in client.load(name).entries:
        if entry.stage >= 0 and entry.service_ms > 0:
            speeds[entry.stage] = speeds.get(entry.stage, 0.0) + 1e3 / entry.service_ms
    return min(speeds.values())


def moved(client: Client, options: argparse.Namespace) -> tuple[Round, str]:
    """One job with a move in it; its figures, and the SHA-256 of its weights."""
    name = client.submit(spec(rebalance=True, pad_ms=options.pad_ms, steps=options.steps)).job
    bound_before = bound_after = 0.0
    move: JobChange | None = None
    for event in client.events(name):
        if event.result is not None and event.result.step == LOOK_AT:
            bound_before = bound(client, name)
        if event.change is not None and event.change.state in (ChangeState.BETTER, ChangeState.NO_BETTER):
            move = move or event.change
            bound_after = bound_after or bound(client, name)
    sha256 = digest(client.wait(name, timeout_s=END_S))
    if move is None or move.before_s is None or move.after_s is None:
        raise SystemExit(f"{name}: no move was made and judged")
    found = Round(
        bound_before=bound_before,
        before=MICROBATCHES / move.before_s,
        bound_after=bound_after,
        after=MICROBATCHES / move.after_s,
        move=move,
    )
    return found, sha256


def lines(found: dict[str, Any]) -> Iterator[str]:
    rounds: list[Round] = found["rounds"]
    moves = [one.move for one in rounds]
    forecasts = [move.forecast for move in moves if move.forecast is not None]
    before, bound_before = [one.before for one in rounds], [one.bound_before for one in rounds]
    after, bound_after = [one.after for one in rounds], [one.bound_after for one in rounds]
    gains = [one.after / one.before for one in rounds]
    step_s = [forecast.step_after_s for forecast in forecasts], [move.after_s or 0.0 for move in moves]
    cost_s = [forecast.cost_s for forecast in forecasts], [move.cost_s or 0.0 for move in moves]
    yield "microbatches/s        measured                 bound"
    yield f"before                {spread(before, '.1f'):24} {spread(bound_before, '.1f')}"
    yield f"after                 {spread(after, '.1f'):24} {spread(bound_after, '.1f')}"
    yield f"gain                  {spread(gains)}×"
    yield "a move                forecast                 measured"
    yield f"step after it, s      {spread(step_s[0], '.3f'):24} {spread(step_s[1], '.3f')}"
    yield f"cost, s               {spread(cost_s[0]):24} {spread(cost_s[1])}"
    yield f"different weights in {len(rounds)} jobs with a move and 1 without: {found['different_weights']}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rounds: list[Round] = []
    with (
        new_folder() as folder,
        mesh(folder) as state,
        Client(state=state) as client,
    ):
        plain = client.submit(spec(rebalance=False, pad_ms=0.0, steps=options.steps)).job
        digests = {digest(client.wait(plain, timeout_s=END_S))}
        for number in range(options.rounds):
            found, sha256 = moved(client, options)
            digests.add(sha256)
            rounds.append(found)
            say(f"round {number + 1}: {found.before:.1f} → {found.after:.1f} microbatches/s")
    return {"rounds": rounds, "different_weights": len(digests)}


if __name__ == "__main__":
    bench(command(__doc__, rounds=3, pad_ms=8.0, steps=60), measure, lines)
