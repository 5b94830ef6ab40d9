"""`dmsc simulate`: simulates the mesh's decisions in virtual time, for up to thousands of instances."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.options import JsonOption, print_json, print_table
from dmsc.console.svg_files import check_plot, write_plot


def simulate(
    scenario: Annotated[
        Path | None, argument("SCENARIO.yaml", "The scenario; see docs/simulator.md.")
    ] = None,
    queue: Annotated[
        Path | None, option("--queue TRACE", "Run a trace of jobs through the queue's decisions instead.")
    ] = None,
    seed: Annotated[
        int | None, option("--seed", "The seed (the scenario's); the same seed gives the same output.", min=0)
    ] = None,
    set_: Annotated[
        list[str] | None,
        option("--set KEY=VALUE", "Override a key of the scenario, or a setting of the queue; repeatable."),
    ] = None,
    plot: Annotated[Path | None, option("--plot FILE.svg", "Draw throughput and events over time.")] = None,
    processes: Annotated[
        int | None,
        option(
            "--processes",
            "The maximal number of processes (one per core for long runs). The output does not depend on it.",
            min=1,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Simulate a scenario in virtual time, with the mesh's own registry, router, binder and step machines.

    No mesh is needed. Files that the scenario names are searched in the scenario's folder. The elapsed time
    goes to stderr, so that the same seed prints the same output.

    Example: dmsc simulate examples/simulate/slow-replica.yaml --plot slow.svg
    """
    from schemas.errors import BadInput

    if (scenario is None) == (queue is None):
        raise BadInput("give either a scenario or --queue TRACE; see docs/simulator.md")
    if queue is not None:
        if plot is not None or processes is not None:
            raise BadInput("--plot and --processes are of scenarios: leave them out with --queue")
        _simulate_queue(queue, set_ or (), seed or 0, json)
        return
    assert scenario is not None
    from dmsc.simulation.results.parallel import simulate as carry_out
    from dmsc.simulation.results.plot import svg
    from dmsc.simulation.results.present import (
        JOB_COLUMNS,
        SHARE_COLUMNS,
        happenings,
        heading,
        job_rows,
        share_rows,
    )
    from dmsc.simulation.scenarios.scenario import load_scenario

    check_plot(plot)
    loaded = load_scenario(scenario, set_ or ())
    began = time.perf_counter()
    report = carry_out(loaded, loaded.seed if seed is None else seed, scenario.parent, processes)
    took_s = time.perf_counter() - began
    if plot is not None:
        write_plot(plot, svg(report))
    if json:
        print_json(report.as_dict())
    else:
        print(heading(report))
        print_table(JOB_COLUMNS, job_rows(report))
        print_table(SHARE_COLUMNS, share_rows(report))
        for line in happenings(report):
            print(line)
    print(
        f"{report.events} events in {took_s:.1f} s: "
        f"{report.simulated_s / max(took_s, 1e-9):.1f} times as fast as real time",
        file=sys.stderr,
    )


def _simulate_queue(trace: Path, overrides: Sequence[str], seed: int, as_json: bool) -> None:
    from dmsc.simulation.queue.queue_settings import queue_settings
    from dmsc.simulation.queue.trace_files import read_trace
    from dmsc.simulation.queue.trace_run import in_lines, run_trace

    settings, lines = queue_settings(overrides), read_trace(trace)
    began = time.perf_counter()
    result = run_trace(lines, settings, seed)
    took_s = time.perf_counter() - began
    if as_json:
        print_json(asdict(result))
    else:
        print("\n".join(in_lines(result)))
    print(f"{result.decisions} decisions in {took_s:.1f} s", file=sys.stderr)
