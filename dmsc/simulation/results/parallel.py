"""A scenario on several processor cores: jobs that know nothing of each other are dealt out to processes.

Each process has the whole scenario, so that every instance has its place and every event its time, and
carries out its own jobs. What comes of it does not depend on how many there are.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from dmsc.simulation.results.report import SimulationReport, WorldResult, account, put_together
from dmsc.simulation.scenarios.scenario import Join, Scenario
from dmsc.simulation.world import JobShare, World, are_apart
from workers.process.prefork import end_with_parent

WORTH_IT = 100_000
"""Microbatches times stages of a run for which other processes are started: some seconds' worth, where a
process takes one to begin."""


def simulate(scenario: Scenario, seed: int, folder: Path, processes: int | None = None) -> SimulationReport:
    """Lets a scenario happen, and reports it.

    Args:
        scenario: what is simulated.
        seed: takes the place of the scenario's own.
        folder: files that the scenario names are looked for here.
        processes: at most so many; by default as many as there are cores, where it is worth it.

    Raises:
        BadInput: a file can't be used, or an event names something that is not there.
    """
    count = min(_parts(scenario), _cores(scenario) if processes is None else processes)
    parts = [JobShare(number, count) for number in range(count)]
    mine = World(scenario, seed, folder, parts[0])  # what is wrong with the scenario is said here
    if count == 1:
        mine.run()
        return put_together(scenario, seed, [account(mine)])
    # A new interpreter each: a copy of this one would take along whatever threads hold at that moment.
    with ProcessPoolExecutor(
        count - 1, multiprocessing.get_context("spawn"), initializer=end_with_parent, initargs=(os.getpid(),)
    ) as pool:
        others = [pool.submit(_carry_out, scenario, seed, folder, part) for part in parts[1:]]
        mine.run()
        return put_together(scenario, seed, [account(mine), *(other.result() for other in others)])


def _carry_out(scenario: Scenario, seed: int, folder: Path, part: JobShare) -> WorldResult:
    world = World(scenario, seed, folder, part)
    world.run()
    return account(world)


def _parts(scenario: Scenario) -> int:
    """Into how many processes a run can be divided."""
    if not are_apart(scenario) or any(isinstance(event, Join) for event in scenario.events):
        return 1  # where a newcomer goes depends on whether its job is done by then
    return sum(job.count for job in scenario.jobs)


def _cores(scenario: Scenario) -> int:
    work = sum(job.count * job.steps * job.microbatches * len(job.all_stages()) for job in scenario.jobs)
    if work < WORTH_IT:
        return 1
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has none
        return os.cpu_count() or 1
