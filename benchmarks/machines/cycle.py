"""From no machine to the first step of a job, and back to none."""

from __future__ import annotations

import argparse
import time

from benchmarks.fault_figures import FaultSheet, Plan
from benchmarks.harness.figures import spread
from benchmarks.machines.scene import job, open_scene
from schemas.job import ENDED
from schemas.machines.records import MachineState

STAGES = 2
IDLE_S = 2.0
SECTION = "cycle"


async def cycle(options: argparse.Namespace, sheet: FaultSheet) -> None:
    """Submissions to a mesh without machines: until the order, the first step, and no machine again.

    *Placed*: from the submission until the driver has been asked for the last machine. *Beyond the agents'
    start*: from the moment at which the last node has joined until the first step is committed. *Back to
    none*: from the job's end until the last machine is gone, less `idle_s`.
    """
    placed, agents, beyond = list[float](), list[float](), list[float]()
    back, seen_idle, emptied, gone = list[float](), list[float](), list[float](), list[float]()
    async with open_scene({"here": {"most": STAGES, "idle_s": IDLE_S}}) as scene:
        for number in range(options.rounds):
            asked = time.time()
            name = (await scene.mesh.client.submit(job(f"cycle-{number}", stages=STAGES, steps=2))).job
            first = ended = 0.0
            async for event in scene.mesh.client.events(name):
                if event.result is not None and not first:
                    first = event.at
                if event.kind == "state" and event.state in ENDED:
                    ended = event.at
            await scene.ended(name)
            none = await scene.history.until_none()
            machines = scene.history.of(name)
            started = max(states[MachineState.STARTING].since for states in machines)
            joined = max(states[MachineState.JOINED].since for states in machines)
            placed.append(started - asked)
            agents.append(joined - started)
            beyond.append(first - joined)
            back.append(none - ended - IDLE_S)
            draining, released = (
                max(states[state].since for states in machines)
                for state in (MachineState.DRAINING, MachineState.RELEASED)
            )
            seen_idle.append(draining - ended - IDLE_S)
            emptied.append(released - draining)
            gone.append(none - released)
    plan = Plan(section=SECTION)
    sheet.add(
        plan.at_most("placed, worst", max(placed), "s", 1.0, spread(placed, unit=" s")),
        plan.figure("agents start and join, worst", max(agents), "s", spread(agents, unit=" s")),
        plan.at_most("first step beyond that, worst", max(beyond), "s", 3.0, spread(beyond, unit=" s")),
        plan.at_most("back to none beyond idle_s, worst", max(back), "s", 2.0, spread(back, unit=" s")),
        plan.figure("… seen idle, worst", max(seen_idle), "s", spread(seen_idle, unit=" s")),
        plan.figure("… emptied, worst", max(emptied), "s", spread(emptied, unit=" s")),
        plan.figure("… gone, worst", max(gone), "s", spread(gone, unit=" s")),
        plan.at_most("machines beyond those needed", scene.history.ordered - STAGES * options.rounds, "", 0),
    )
