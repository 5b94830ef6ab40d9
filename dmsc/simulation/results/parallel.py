"""Runs a scenario on several cores: jobs that do not influence each other are distributed among processes.

Each process builds the whole scenario, so that every instance has its place and every event its time, but
simulates only its own jobs. The result does not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bus.parent_death import end_with_parent
from dmsc.simulation.results.report import SimulationReport, WorldResult, account, put_together
from dmsc.simulation.scenarios.scenario import Join, Migration, Scenario
from dmsc.simulation.world import JobShare, World, are_apart

WORTH_IT = 100_000
"""Runs with at least this many microbatches × stages use other processes: they take some seconds, while a
process takes one second to start."""


def simulate(scenario: Scenario, seed: int, folder: Path, processes: int | None = None) -> SimulationReport:
    """Simulate a scenario and return the report.

    Args:
        scenario: What is simulated.
        seed: The seed, in place of the scenario's.
        folder: The folder of files that the scenario names.
        processes: The maximal number of processes. Default: one per core for long runs.

    Raises:
        BadInput: A file can't be used, or an event names something that does not exist.
    """
    count = min(_parts(scenario), _cores(scenario) if processes is None else processes)
    parts = [JobShare(number, count) for number in range(count)]
    own_world = World(scenario, seed, folder, parts[0])  # raises the errors of the scenario here
    if count == 1:
        own_world.run()
        return put_together(scenario, seed, [account(own_world)])
    # Each process is a new interpreter: a fork would copy locks that threads hold at that moment.
    with ProcessPoolExecutor(
        count - 1, multiprocessing.get_context("spawn"), initializer=end_with_parent, initargs=(os.getpid(),)
    ) as pool:
        others = [pool.submit(_carry_out, scenario, seed, folder, part) for part in parts[1:]]
        own_world.run()
        return put_together(scenario, seed, [account(own_world), *(other.result() for other in others)])


def _carry_out(scenario: Scenario, seed: int, folder: Path, part: JobShare) -> WorldResult:
    world = World(scenario, seed, folder, part)
    world.run()
    return account(world)


def _parts(scenario: Scenario) -> int:
    """The number of processes into which a run can be divided."""
    if not are_apart(scenario) or any(isinstance(event, Join | Migration) for event in scenario.events):
        return 1  # the place of a newcomer depends on whether its job is done by then
    return sum(job.count for job in scenario.jobs)


def _cores(scenario: Scenario) -> int:
    work = sum(job.count * job.steps * job.microbatches * len(job.all_stages()) for job in scenario.jobs)
    if work < WORTH_IT:
        return 1
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has none
        return os.cpu_count() or 1
