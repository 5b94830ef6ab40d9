"""What faults cost: stalls, goodput, waste, hashes under kills, each figure beside its bar.

    python benchmarks/faults.py [--only stall,data,freeze,kills,goodput,stage,join,overhead,peers] [--seed 0]

Compute is padded (`workers/models/padded.py`): devices are independent of the cores that they share here,
and a step takes 100 ms or more. Each section has meshes of its own on this machine, real processes and real
signals through `dmsc.chaos`; each disturbed run is compared with a clean one of the same job. Each section
can be run alone. The defaults are the bars' own sizes, about an hour and a half on two cores; shorter, for
instance:

    python benchmarks/faults.py --only kills --kills 40
    python benchmarks/faults.py --only freeze --freezes 4 --minutes 2
    python benchmarks/faults.py --only overhead,peers --rounds 1 --seconds 60

A figure that misses its bar is marked MISSED, and the exit code is 0. A section that can't be measured to
its end keeps the figures it has, says why, and the next one follows; the exit code is 1 then. JSON goes to
`--out` after every figure.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.fault_runs import add_only, run_and_exit
from benchmarks.fault_sections import SECTIONS
from benchmarks.harness.command import command


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        seed=(0, "of the plans of faults"),
        limit=(60.0, "minutes for a section"),
        out=(Path("runs/bench-faults.json"), "the file for the figures"),
        stalls=(20, "kills in `stall`"),
        data_kills=(20, "kills in `data`"),
        freezes=(10, "frozen instances in `freeze`"),
        minutes=(10.0, "of oversubscription in `freeze`"),
        kills=(200, "in the soak, 50 a job"),
        stages=(3, "losses of a whole stage, each way"),
        joins=(8, "kills in `join`"),
        seconds=(90.0, "of each run with a kill every 10 s: `goodput`, `peers`"),
        rounds=(3, "of `overhead` and `peers`, interleaved"),
    )
    add_only(parser, SECTIONS)
    run_and_exit(parser.parse_args(), SECTIONS)


if __name__ == "__main__":
    main()
