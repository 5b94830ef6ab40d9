"""The planner beside solvers' bounds, all assignments, and the rule that placed units before it.

    python -m benchmarks.planner --data ../shared/data [--only cuts,size,…] [--solver-s 60] [--seed 0]

Each section prints figures beside their bars; one that misses its bar is marked MISSED, and the exit code
is 0. A section whose data are missing says so in one line, and the exit code is 1 then. Proofs need scipy
(the extra `bench-policies`); without it cuts are compared with the best known alone. JSON goes to `--out`
after each section.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.command import command, some_of
from benchmarks.harness.figures import Sheet
from benchmarks.harness.sections import run_sections
from benchmarks.planner_sections import SECTIONS
from benchmarks.policy_sections.sheet import Bench, Row


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        seed=(0, "of whatever is drawn"),
        solver_s=(60.0, "seconds that the solver has for each graph; 0: do not solve"),
        out=(Path("runs/bench-planner.json"), "the file for the figures"),
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="with models/")
    parser.add_argument(
        "--only",
        type=some_of(SECTIONS),
        default=tuple(SECTIONS),
        metavar="NAMES",
        help="sections, with commas",
    )
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        sys.exit(f"{arguments.data}: no such folder; --data names the one that has models/")
    sheet = Sheet[Row](arguments.out)
    bench = Bench(data=arguments.data, seed=arguments.seed, sheet=sheet, solver_s=arguments.solver_s)
    whole = run_sections(arguments.only, SECTIONS, bench)
    print(sheet.summary, file=sys.stderr)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
