"""How soon machines come and go by themselves, and what is ordered twice when leaders are killed.

    python -m benchmarks.machines [--only cycle,kills,gangs,pods] [--rounds 10] [--kills 50] [--pairs 20]

Each section has a mesh without slots, a provisioner, and machines that are processes here; node agents start
on the cores that everything shares. A figure that misses its bar is marked MISSED, and the exit code is 0;
JSON goes to `--out` after each figure. Shorter:

    python -m benchmarks.machines --rounds 2 --kills 6 --pairs 2
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fault_runs import add_only, run_and_exit
from benchmarks.harness.command import command
from benchmarks.machines.cycle import cycle
from benchmarks.machines.gangs import gangs
from benchmarks.machines.kills import kills
from benchmarks.machines.pods import pods

SECTIONS = {"cycle": cycle, "kills": kills, "gangs": gangs, "pods": pods}


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        rounds=(10, "jobs of the sections `cycle` and `pods`"),
        kills=(50, "of leaders, in the sections `kills` and `pods`"),
        pairs=(20, "of jobs, in the section `gangs`"),
        seed=(1, "of the kills, and of the first pair; each next one has the next", 0),
        limit=(30.0, "minutes for a section"),
        out=(Path("runs/bench-machines.json"), "the file for the figures"),
    )
    add_only(parser, SECTIONS)
    run_and_exit(parser.parse_args(), SECTIONS)


if __name__ == "__main__":
    main()
