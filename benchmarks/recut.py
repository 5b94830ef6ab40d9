"""What a re-cut of a running job costs: how long training rests, and what the copy slows it down.

    python benchmarks/recut.py [--rounds 2] [--recuts 10] [--width 512] [--pad-ms 18] [--json]

A job of two stages (padded blocks with dropout, one parameter in both stages) is cut anew again and again,
there and back, each time after some steps that nothing disturbs. One job more is cut once, and one never; all
must have the same weights. Bars: training rests for at most one median step (95th percentile), and the steps
beside a copy take at most a tenth longer in all than as many steps under the same plan without one.

    moved   MB of weights and optimizer state that went over links
    copy    seconds from the order until the receivers have caught up
    rest    seconds for which training rested, beside the median step
    beside  the steps beside copies, by the median step without one under the same plan
    first   the first step under a new plan, the rest within it, by the median step
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.emptiness import some
from benchmarks.harness.figures import percentile, spread
from benchmarks.harness.jobs import digest, job
from benchmarks.harness.meshes import mesh, new_folder
from dmsc.client.client import Client
from schemas.recut import RecutRecord, RecutState, cuts_text

BLOCKS = 9
LAYERS = BLOCKS + 2
PLANS = f"0-3,4-{LAYERS - 1}", f"0-6,7-{LAYERS - 1}"
"""Three blocks and six, then six and three: a step takes as long under either."""
QUIET_STEPS = 4
"""Steps that are measured without a copy before each re-cut."""
SETTLING = 2
"""First steps under a plan that are not compared: links are built, and senders learn speeds."""
STEPS_EACH = 15
"""Steps of a job for each of its re-cuts."""
END_S = 600.0


@dataclass
class Account:
    """One job: its re-cuts, and its steps by the plan under which they were made, in seconds."""

    done: list[RecutRecord] = field(default_factory=list)
    quiet: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    sha256: str = ""


def spec(options: argparse.Namespace, name: str) -> dict[str, Any]:
    made = job(
        name,
        steps=STEPS_EACH * options.recuts,
        microbatches=4,
        layers=BLOCKS,
        width=options.width,
        pad_ms=options.pad_ms,
        model={"dropout": 0.1},
        parallel={"segmentation": "uniform"},
    )
    return made | {"automation": {"mode": "off"}}


def cut(client: Client, options: argparse.Namespace, name: str, recuts: int) -> Account:
    """One job that is cut anew so many times, if its steps suffice."""
    found = Account()
    name = client.submit(spec(options, name)).job
    plan = ""
    undisturbed, copying = -SETTLING, False
    for event in client.events(name):
        if event.recut is not None:
            copying = event.recut.state is RecutState.PREPARING
            if event.recut.state is RecutState.DONE:
                found.done.append(event.recut)
                plan, undisturbed = cuts_text(event.recut.cuts), -SETTLING
        if event.result is None:
            continue
        step_s = event.result.step_s
        if copying:
            if plan:
                found.beside.setdefault(plan, []).append(step_s)
            continue
        undisturbed += 1
        if undisturbed > 0 and plan:
            found.quiet.setdefault(plan, []).append(step_s)
        elif undisturbed == 1 - SETTLING and found.done:
            found.first.append(step_s)
        if undisturbed >= QUIET_STEPS and len(found.done) < recuts:
            client.recut(name, PLANS[plan == PLANS[0]])
            copying = True
    record = client.wait(name, timeout_s=END_S)
    found.sha256 = digest(record)
    found.done = [each for each in record.recuts if each.state is RecutState.DONE]  # with their rests
    if recuts and not found.done:
        raise SystemExit(f"{name}: none of {recuts} re-cuts came into force")
    return found


def slowdown(accounts: list[Account]) -> tuple[float, int]:
    """Steps beside copies by as many undisturbed ones under the same plan, and how many there were."""
    took = expected = 0.0
    count = 0
    for account in accounts:
        for plan, beside in account.beside.items():
            took, count = took + sum(beside), count + len(beside)
            expected += median(account.quiet[plan]) * len(beside)
    some(range(count), "steps beside a copy")
    return took / expected, count


def lines(found: dict[str, Any]) -> Iterator[str]:
    accounts: list[Account] = found["accounts"]
    done = [each for account in accounts for each in account.done]
    step = median(time for account in accounts for times in account.quiet.values() for time in times)
    rests = [each.pause_s or 0.0 for each in done]
    worst = percentile(rests, 0.95)
    ratio, count = slowdown(accounts)
    first = [time / step for account in accounts for time in account.first]
    moved = spread([each.moved_bytes / 1e6 for each in done], ".1f")
    yield f"re-cuts               {len(done)} in {len(accounts)} jobs; {moved} MB moved by each"
    yield f"a median step, s      {step:.3f}"
    yield f"copy, s               {spread([each.copy_s or 0.0 for each in done])}"
    yield f"rest, s               {spread(rests, '.3f')}; p95 {worst:.3f}"
    yield f"rest in steps, p95    {worst / step:.2f} (bar 1: {_kept(worst <= step)})"
    yield f"steps beside a copy   {ratio:.3f}× of {count} others (bar 1.10: {_kept(ratio <= 1.10)})"
    yield f"first step, in steps  {spread(first)}"
    numbers = ", ".join(str(len(account.done)) for account in accounts)
    same = found["different_weights"] == 1
    weights = found["different_weights"]
    yield f"different weights     {weights} with {numbers}, 0 re-cuts (bar 1: {_kept(same)})"


def _kept(kept: bool) -> str:
    return "met" if kept else "MISSED"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with new_folder() as folder, mesh(folder) as state, Client(state=state) as client:
        accounts = []
        for number in range(options.rounds):
            accounts.append(cut(client, options, f"recut-{number}", options.recuts))
            rests = [round(each.pause_s or 0.0, 3) for each in accounts[-1].done]
            say(f"round {number + 1}: rests {rests}")
        accounts.append(cut(client, options, "once", 1))
        alone = cut(client, options, "left-alone", 0)
        digests = {alone.sha256, *(account.sha256 for account in accounts)}
    return {"accounts": accounts, "different_weights": len(digests)}


if __name__ == "__main__":
    bench(command(__doc__, rounds=2, recuts=10, width=512, pad_ms=18.0), measure, lines)
