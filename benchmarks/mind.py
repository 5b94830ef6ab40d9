"""Modules and the orchestrator's own loop, on against off, on a real mesh that is disturbed by scripts.

    python -m benchmarks.mind [--only slow-device,calm] [--rounds 5] [--seconds 30] [--modules a,b] [--seed 0]

A scenario is a mesh with emulated slots, a padded job, and a script by a seed: what becomes of which slot and
when (`mind_sections/scenarios.py`). Slowness belongs to the slot (ADR-0098). Each round runs the same script
three times, in turn, every other round in reverse: `off`, `on`, `off again`. `on` are modules by name, those
of ADR-0097 if none is named, and the loop (automation: act); `off` is no module, and automation off. Figures
are steps per second from the script's beginning until half its length after its end:

    on ÷ off         paired by round, geometric mean with its 95 % bounds; off again ÷ off beside it
    possible ÷ off   of the best plan for the slots as they are at each moment, at no cost (`oracle.py`)
    … by routes      of the plan that the job had, shared out as well as can be: weights gain no more
    part of the gap  that `on` closed, where a planner that knows the script gains a tenth and more
    steps to the new optimum   where nothing but a re-cut helps: until 0.9 of it
    forecasts        of each change that was made, beside what came of it

    python -m benchmarks.mind --only learnt [--pairs 10] [--learnt-in slow-device] [--against untrained,rules]

The section `learnt` is another comparison (`mind_sections/learnt.py`), and runs only where it is named: the
learnt module `change-outcomes` against none, in pairs over seeds that nothing was trained on, each run 25 s
long; gains with bounds, and p after Holm. The orchestrator's own loop is off there. `--against` adds runs of
the same module before its training, and pairs of the own loop alone in a mesh of its own.

A figure that misses its bar is marked MISSED, and the exit code is 0. JSON goes to `--out` after each
scenario.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.harness.command import command, say, some_of
from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import Figure, Sheet
from benchmarks.harness.meshes import new_folder, open_mesh
from benchmarks.harness.processes import turns
from benchmarks.mind_sections.learnt import (
    AGAINST,
    CALM_S,
    LASTS_S,
    LEARNT,
    LEARNT_SCENARIOS,
    MODULES,
    MOST_EXACT,
    OFF_BESIDE_RULES,
    PAD_MS,
    PAIRS,
    RULES,
    SECTION,
    TAIL,
    UNSEEN,
    learnt_figures,
)
from benchmarks.mind_sections.results import AGAIN, OFF, ON, figures_of, overall, rates
from benchmarks.mind_sections.runs import MindBench, MindRun, run_once
from benchmarks.mind_sections.scenarios import SCENARIOS
from bus.logs import configure_logging
from dmsc.process.policy_loading import BUILT_IN, DEFAULT_POLICIES
from schemas.envelope import EntityKind


@asynccontextmanager
async def bench_of(name: str, *, own_loop: bool = True, **times: float) -> AsyncIterator[MindBench]:
    """A mesh for all runs of one scenario; `times` are those of a run."""
    scenario = SCENARIOS[name]
    with new_folder() as folder:
        emulated = ("1",) * max(scenario.slots.values())
        async with open_mesh(
            *scenario.slots,
            emulate_slots=emulated,
            emulation=folder,
            policies=(),
            own_loop=own_loop,
            kind=EntityKind.TAP,
            tell=say,
        ) as mesh:
            yield MindBench(mesh=mesh, scripts=folder, scenario=scenario, **times)


async def of_scenario(name: str, options: argparse.Namespace) -> list[MindRun]:
    """All rounds of one scenario, in one mesh."""
    runs = []
    async with bench_of(name, lasts_s=options.seconds, pad_ms=options.pad_ms) as bench:
        for number, mode in turns((OFF, ON, AGAIN), options.rounds):
            names = options.modules if mode == ON else ()
            runs.append(await run_once(bench, mode, number, names, options.seed + number))
    return runs


async def pairs_of(name: str, options: argparse.Namespace) -> list[MindRun]:
    """All pairs of one scenario: the module and none in a mesh without own loop, the loop in another one."""
    runs = []
    modes = (OFF, LEARNT, *(mode for mode in options.against if mode != RULES))
    for own_loop, sides in ((False, modes), (True, (OFF_BESIDE_RULES, RULES))):
        if own_loop and RULES not in options.against:
            continue
        times = {"lasts_s": LASTS_S, "pad_ms": PAD_MS, "calm_s": CALM_S, "tail": TAIL}
        async with bench_of(name, own_loop=own_loop, **times) as bench:
            for number, mode in turns(sides, options.pairs):
                seed, names = UNSEEN + options.seed + number, MODULES.get(mode, ())
                runs.append(await run_once(bench, mode, number, names, seed, automated=mode == RULES))
    return runs


async def measure_learnt(options: argparse.Namespace, sheet: Sheet[Figure]) -> None:
    """The section `learnt`."""
    runs = {}
    for name in options.learnt_in:
        say(f"{name}: {SCENARIOS[name].what}; {', '.join(MODULES[LEARNT])} against none")
        runs[name] = await pairs_of(name, options)
        print(name, *told_of(runs[name], LEARNT), sep="\n", flush=True)
    found = list(learnt_figures(runs))
    sheet.add(*found)
    print(*map(line, found), sep="\n")


def line(figure: Figure) -> str:
    value = "–" if figure.value is None else f"{figure.value:.3f}"
    parts = (f"{figure.section:16} {figure.name:28} {value:>8}", figure.bar, figure.verdict, figure.note)
    return "  ".join(part for part in parts if part)


def told_of(runs: list[MindRun], mode: str = ON) -> list[str]:
    """What was adopted and declined, and each change's forecast beside what came of it."""
    lines = []
    for run in (run for run in runs if run.mode == mode):
        lines += [f"    {text}" for text in run.adopted]
        lines += [f"    declined {count}×: {text}" for text, count in sorted(run.declined.items())]
        for change in run.changes:
            after = "not measured" if change.after_s is None else f"{change.after_s:.3f} s"
            lines.append(
                f"    {change.by}: {change.what}; a step {change.before_s:.3f} s, "
                f"forecast {change.forecast_s:.3f} s, then {after}"
            )
    return lines


async def measure(options: argparse.Namespace) -> None:
    sheet = Sheet[Figure](options.out)
    gains, changes = {}, []
    for name in (name for name in options.only if name != SECTION):
        say(f"{name}: {SCENARIOS[name].what}; on: {', '.join(options.modules)}")
        runs = await of_scenario(name, options)
        found = list(figures_of(name, runs))
        sheet.add(*found)
        print(*map(line, found), *told_of(runs), sep="\n", flush=True)
        gains[name] = rates(runs, ON, OFF).mean
        changes += [change for run in runs if run.mode == ON for change in run.changes]
    if SECTION in options.only:
        await measure_learnt(options, sheet)
    found = list(overall(gains, changes))
    sheet.add(*found)
    print(*map(line, found), sep="\n")
    print(sheet.summary, file=sys.stderr)


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        rounds=(5, "of off, on and off again"),
        seconds=(30.0, "length of a script", 5),
        pad_ms=(6.0, "wait of a block, forward; twice that backward", 1),
        seed=(0, "of the first round's scripts; each next round has the next"),
        pairs=(PAIRS, f"of the section {SECTION}, each with a seed of its own"),
        out=(Path("runs/bench-mind.json"), "the file for the figures"),
    )
    parser.add_argument(
        "--only", type=some_of((*SCENARIOS, SECTION)), default=tuple(SCENARIOS), metavar="NAMES"
    )
    parser.add_argument("--modules", type=some_of(BUILT_IN), default=DEFAULT_POLICIES, metavar="NAMES")
    parser.add_argument("--learnt-in", type=some_of(SCENARIOS), default=LEARNT_SCENARIOS, metavar="NAMES")
    parser.add_argument("--against", type=some_of(AGAINST), default=(), metavar="MODES")
    options = parser.parse_args()
    if options.pairs > MOST_EXACT:
        parser.error(f"--pairs {options.pairs}: the test is exact, and takes at most {MOST_EXACT}")
    configure_logging(level="error")
    with measuring():
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
