"""Two jobs of which one at a time has room: both have to end."""

from __future__ import annotations

import argparse
import asyncio
import random

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.machines.scene import Scene, job, open_scene

POOLS = {"near": {"most": 2}, "far": {"most": 1}}
SIZES = ((2, 2), (2, 3), (3, 2), (3, 3))
PATIENCE_S = 180.0


async def gangs(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Pairs of jobs of two or three slots at pools of three: how many jobs do not end."""
    stuck, took = list[str](), list[float]()
    async with open_scene(POOLS) as scene:
        for seed in range(options.seed, options.seed + options.pairs):
            began = asyncio.get_running_loop().time()
            stuck += await _pair(scene, seed)
            took.append(asyncio.get_running_loop().time() - began)
            say(f"pair {seed}: {took[-1]:.1f} s, {scene.history.ordered} machines")
    plan = Plan(section="gangs", seed=options.seed)
    sheet.add(
        plan.at_most(
            "jobs that did not end", len(stuck), "", 0, "; ".join([f"{options.pairs} pairs", *stuck])
        ),
        plan.figure("a pair, worst", max(took), "s"),
        plan.figure("machines for a pair", scene.history.ordered / options.pairs),
    )


async def _pair(scene: Scene, seed: int) -> list[str]:
    """Why jobs did not end."""
    random_, client = random.Random(seed), scene.mesh.client
    names = []
    for number, size in enumerate(random_.choice(SIZES)):
        priority = random_.choice((0, 0, 5))
        spec = job(f"gang-{seed}-{number}", stages=size, steps=3, queue={"priority": priority})
        names.append((await client.submit(spec)).job)
        await asyncio.sleep(random_.choice((0.0, random_.uniform(0.0, 3.0))))
    stuck = []
    for name in names:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await scene.ended(name)
        except TimeoutError:
            record = await client.job(name)
            stuck.append(f"pair {seed}: {name} {record.state.value}: {record.reason}")
            await client.cancel(name)
    await scene.history.until_none()
    return stuck
