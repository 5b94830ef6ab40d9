"""How fast a warm fork server starts an instance, and what one costs in memory, beside a fresh start.

    python -m benchmarks.startup            # table
    python -m benchmarks.startup --json     # one JSON object

Measured from the agent's order to the first line of the child's `main` (monotonic clock, same machine), for
forked children and for children that import torch by themselves, interleaved. Memory is what the kernel says
in `smaps_rollup`: private (the child's own pages) and shared (pages that it has in common with the server).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.command import bench, command
from benchmarks.harness.meshes import new_folder
from entities.cluster.fork_server_client import ForkServerClient

FORKED, FRESH = 20, 4
"""Starts of each kind; a fresh one takes seconds."""

ROOT = str(Path(__file__).resolve().parent.parent)


def main(payload: dict[str, Any], result: Path | None) -> int:
    """What the measured child runs: note the time and the memory, compute a little, and note it again."""
    began = time.monotonic()
    import torch

    before = memory()
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 256)).sum().backward()
    optimizer.step()
    assert result is not None
    result.write_text(
        json.dumps({"main_at": began, "stepped_at": time.monotonic(), "at_start": before, "after": memory()})
    )
    return 0


def memory() -> dict[str, int]:
    """This process's resident bytes: `private`, `shared`, and `pss` (shared pages divided by their users)."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        key, value = line.split()[:2]
        found[key.rstrip(":")] = int(value) << 10
    return {
        "private": found["Private_Clean"] + found["Private_Dirty"],
        "shared": found["Shared_Clean"] + found["Shared_Dirty"],
        "pss": found["Pss"],
    }


async def start_one(server: ForkServerClient, name: str, folder: Path) -> dict[str, Any]:
    """One start: seconds to `main` and to the first optimizer step, and the child's memory."""
    result = folder / f"{name}.json"
    asked = time.monotonic()
    child = await server.spawn(
        name, "benchmarks.startup", {}, log_path=folder / f"{name}.log", threads=1, result=result
    )
    exit = await child.exit
    if exit.code != 0:
        raise SystemExit(f"{name}: {exit}; see {child.log_path}")
    found = json.loads(result.read_bytes())
    return {
        "to_main_s": found["main_at"] - asked,
        "to_step_s": found["stepped_at"] - asked,
        "at_start": found["at_start"],
        "after": found["after"],
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with new_folder() as folder:
        return await starts_in(folder)


async def starts_in(folder: Path) -> dict[str, Any]:
    """Both kinds of start, interleaved, on two servers that live side by side."""
    began = time.monotonic()
    async with ForkServerClient(name="bench", logs=folder, code_path=(ROOT,)) as warm:
        ready = await warm.wait_ready()
        warm_after_s = time.monotonic() - began
        if ready.method != "fork":
            raise SystemExit("this machine can't fork safely; see the fork server's warning above")
        async with ForkServerClient(name="fresh", logs=folder, code_path=(ROOT,), method="spawn") as cold:
            await cold.wait_ready()
            forked, fresh = [], []
            for number in range(FORKED):
                forked.append(await start_one(warm, f"forked-{number}", folder))
                if number % (FORKED // FRESH) == 0:
                    fresh.append(await start_one(cold, f"fresh-{number}", folder))
    return {
        "server_warm_s": warm_after_s,
        "server_preload_s": ready.preload_s,
        "forked": summary(forked),
        "fresh": summary(fresh),
    }


def summary(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the whole range of the times."""
    found: dict[str, Any] = {"starts": len(starts)}
    for key in ("to_main_s", "to_step_s"):
        times = [start[key] for start in starts]
        found[key] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    for moment in ("at_start", "after"):
        for kind in ("private", "shared", "pss"):
            found[f"{kind}_{moment}_bytes"] = int(statistics.median(start[moment][kind] for start in starts))
    return found


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"fork server warm after {found['server_warm_s']:.2f} s"
    for kind in ("forked", "fresh"):
        part = found[kind]
        main_at, step_at = part["to_main_s"], part["to_step_s"]
        yield (
            f"{kind:>7}: order → main {main_at['median'] * 1e3:7.1f} ms "
            f"({main_at['min'] * 1e3:.1f}–{main_at['max'] * 1e3:.1f}), "
            f"→ first optimizer step {step_at['median'] * 1e3:7.1f} ms; "
            f"private {part['private_at_start_bytes'] / 1e6:.0f} MB, after the step "
            f"{part['private_after_bytes'] / 1e6:.0f} MB, shared {part['shared_after_bytes'] / 1e6:.0f} MB "
            f"({part['starts']} starts)"
        )


if __name__ == "__main__":
    if sys.platform != "linux":
        raise SystemExit("smaps_rollup and fork: this benchmark needs Linux")
    bench(command(__doc__), measure, lines)
