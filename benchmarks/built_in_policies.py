"""The built-in policies' models on recorded data: the held-out part, beside the baselines they must beat.

    python -m benchmarks.built_in_policies --data ../shared/data [--only congestion,faults,…] [--seed 0]

Each section says which data it reads, how it was split (before anything was trained), and prints a table:
the module, the baselines, the bar, and whether it was met. A figure that misses its bar is marked MISSED,
and the exit code is 0. A section that can't be measured to its end, because its data are missing, empty, or
of another form, says so in one line, and the next one follows; the exit code is 1 then. JSON goes to `--out`
after every section.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.command import command, some_of
from benchmarks.harness.figures import Sheet
from benchmarks.harness.sections import run_sections
from benchmarks.policy_sections import SECTIONS
from benchmarks.policy_sections.sheet import Bench, Row


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        seed=(0, "of whatever is drawn"),
        out=(Path("runs/bench-policies.json"), "the file for the figures"),
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="with te/, telemetry/, …")
    parser.add_argument(
        "--only",
        type=some_of(SECTIONS),
        default=tuple(SECTIONS),
        metavar="NAMES",
        help="sections, with commas",
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="for PNGs of what there is to draw (needs matplotlib)"
    )
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        sys.exit(
            f"{arguments.data}: no such folder; --data names the one that has te/, telemetry/, failures/"
        )
    sheet = Sheet[Row](arguments.out)
    bench = Bench(data=arguments.data, seed=arguments.seed, sheet=sheet, pictures=arguments.pictures)
    ended = run_sections(arguments.only, SECTIONS, bench)
    print(sheet.summary, file=sys.stderr)
    sys.exit(0 if ended else 1)


if __name__ == "__main__":
    main()
