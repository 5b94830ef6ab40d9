"""Provisioner and orchestrator killed at random moments while machines come and go."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.command import say
from benchmarks.machines.scene import Scene, job, open_scene
from schemas.machines.records import MachineState

STAGES = 2
POOL = "here"
PAUSES_S = 0.1, 2.5
"""Between two kills, each of one that leads."""


async def kills(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Jobs one after the other while leaders are killed: machines too many, and names started twice.

    The pool would give twice as many as each job needs, so that a second order would be seen.
    """
    random_ = random.Random(options.seed)
    hits, jobs = Counter[str](), 0
    async with open_scene({POOL: {"most": 2 * STAGES, "idle_s": 1.0}}) as scene:
        while hits.total() < options.kills:
            jobs += 1
            spec = job(f"kills-{jobs}", stages=STAGES, steps=10, pad_ms=10)
            whole = asyncio.create_task(_to_none(scene, (await scene.mesh.client.submit(spec)).job))
            try:
                while not whole.done() and hits.total() < options.kills:
                    await asyncio.wait({whole}, timeout=random_.uniform(*PAUSES_S))
                    if not whole.done():
                        await _kill(scene, random_.choice(("provisioner", "orchestrator")), hits)
                await whole
            finally:
                whole.cancel()
            say(f"job {jobs}: {hits.total()} kills, {scene.history.ordered} machines")
    history = scene.history
    twice = [name for name in history.machines if scene.process_starts(POOL, name) > 1]
    ordered_again = [name for name, states in history.machines.items() if MachineState.DOUBTED in states]
    record = history.records[POOL]
    plan = Plan(section="kills", seed=options.seed, fired=hits.total())
    of_each = ", ".join(f"{count} of the {name}" for name, count in sorted(hits.items()))
    sheet.add(
        plan.at_most("machines ordered twice", len(twice), "", 0, of_each),
        plan.at_most("machines beyond those needed", record.number - STAGES * jobs, "", 0, f"{jobs} jobs"),
        plan.at_most("failures", record.failures, "", 0),
        plan.figure("orders in doubt", len(ordered_again)),
    )


async def _to_none(scene: Scene, name: str) -> None:
    await scene.ended(name)
    await scene.history.until_none()


async def _kill(scene: Scene, who: str, hits: Counter[str]) -> None:
    if who == "provisioner":
        await scene.kill_provisioner()
    else:
        await scene.kill_orchestrator()
    hits[who] += 1
