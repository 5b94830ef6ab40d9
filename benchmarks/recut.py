"""What a re-cut of a running job costs: how long training rests, and what the copy slows it down.

    python benchmarks/recut.py [--rounds 3] [--width 512] [--moved 3] [--pad-ms 28] [--json]

A job of two stages (padded blocks with dropout, one parameter in both stages) is cut anew twice in each
round, there and back; the last job is left alone, and all must have the same weights. Bars: training rests
for at most one median step (95th percentile), and steps beside the copy take at most a tenth longer.

    moved   MB of weights and optimizer state that went over links
    copy    seconds from the order until the receivers have caught up
    rest    seconds for which training rested, beside the median step
    beside  the median step while it was copied, by the median step otherwise
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.figures import percentile, spread
from benchmarks.harness.jobs import digest, job
from benchmarks.harness.meshes import mesh, new_folder
from dmsc.client.client import Client
from schemas.recut import RecutRecord, RecutState

BLOCKS = 8
LAYERS = BLOCKS + 2
STEPS = 22
ASKED_AT = (5, 13)
END_S = 300.0


def spec(options: argparse.Namespace, name: str) -> dict[str, Any]:
    return job(
        name,
        steps=STEPS,
        microbatches=4,
        layers=BLOCKS,
        width=options.width,
        pad_ms=options.pad_ms,
        model={"dropout": 0.1},
        parallel={"segmentation": "uniform"},
    )


def cut(client: Client, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """One job that is cut anew, there and back: its re-cuts, steps, and steps beside a copy."""
    name = client.submit(spec(options, f"recut-{number}")).job
    half = LAYERS // 2
    there = half + options.moved
    plans = {
        ASKED_AT[0]: f"0-{there - 1},{there}-{LAYERS - 1}",
        ASKED_AT[1]: f"0-{half - 1},{half}-{LAYERS - 1}",
    }
    done: list[RecutRecord] = []
    quiet: list[float] = []
    beside: list[float] = []
    under_way = False
    for event in client.events(name):
        if event.recut is not None:
            under_way = event.recut.state is RecutState.PREPARING
            if event.recut.state is RecutState.DONE:
                done.append(event.recut)
        if event.result is not None:
            (beside if under_way else quiet).append(event.result.step_s)
            if (plan := plans.get(event.result.step)) is not None:
                client.recut(name, plan)
    sha256 = digest(client.wait(name, timeout_s=END_S))
    if len(done) != len(plans):
        raise SystemExit(f"{name}: {len(done)} of {len(plans)} re-cuts came into force")
    return {"done": done, "quiet": quiet[2:], "beside": beside, "sha256": sha256}


def lines(found: dict[str, Any]) -> Iterator[str]:
    rounds = found["rounds"]
    done: list[RecutRecord] = [each for one in rounds for each in one["done"]]
    step = median(time for one in rounds for time in one["quiet"])
    beside = [time for one in rounds for time in one["beside"]]
    rests = [each.pause_s or 0.0 for each in done]
    worst = percentile(rests, 0.95)
    yield f"moved, MB             {spread([each.moved_bytes / 1e6 for each in done], '.1f')}"
    yield f"copy, s               {spread([each.copy_s or 0.0 for each in done])}"
    yield f"rest, s               {spread(rests, '.3f')}; p95 {worst:.3f}, a median step {step:.3f}"
    yield f"rest in steps, p95    {worst / step:.2f} (bar 1)"
    yield f"steps beside the copy {median(beside) / step:.2f}× ({len(beside)} steps; bar 1.10)"
    yield f"different weights in {len(rounds)} jobs with re-cuts and 1 without: {found['different_weights']}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with new_folder() as folder, mesh(folder) as state, Client(state=state) as client:
        rounds = []
        for number in range(options.rounds):
            rounds.append(cut(client, options, number))
            say(f"round {number + 1}: rests {[each.pause_s for each in rounds[-1]['done']]}")
        alone = client.submit(spec(options, "left-alone")).job
        digests = {digest(client.wait(alone, timeout_s=END_S)), *(one["sha256"] for one in rounds)}
    return {"rounds": rounds, "different_weights": len(digests)}


if __name__ == "__main__":
    bench(command(__doc__, rounds=3, width=512, moved=3, pad_ms=28.0), measure, lines)
