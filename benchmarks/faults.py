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

import argparse
import asyncio
import os
import sys
import time
import traceback
import uuid
from pathlib import Path

import psutil

from benchmarks.fault_figures import FaultFigure, FaultSheet, Plan
from benchmarks.fault_sections import SECTIONS
from benchmarks.harness.command import command, say, some_of
from benchmarks.harness.emptiness import told
from bus.logs import configure_logging
from dmsc.process.interrupts import interrupts

MARK = "DMSC_BENCH_FAULTS"
"""In the environment of everything that this process starts, however far it is removed from it."""
GONE_S = 10.0


def descendants(mark: str) -> list[psutil.Process]:
    """Processes that we, or what we started, have started and that still live."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(MARK) == mark and process.pid != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # another user's, or it has just ended
    return found


def left_behind(mark: str) -> list[psutil.Process]:
    """What is left after a moment's patience; it is killed."""
    _, left = psutil.wait_procs(descendants(mark), timeout=GONE_S)
    for process in left:
        process.kill()
    return list(left)


async def measure(arguments: argparse.Namespace, sheet: FaultSheet) -> bool:
    """Whether all sections came to their end."""
    mark = os.environ[MARK] = uuid.uuid4().hex
    whole = True
    with interrupts():
        for name in arguments.only:
            began = time.monotonic()
            say(f"{name}: {str(SECTIONS[name].__doc__).splitlines()[0]}")
            try:
                async with asyncio.timeout(60 * arguments.limit) as limit:
                    await SECTIONS[name](arguments, sheet)
            except Exception as error:
                whole = False
                if told(error) is None:
                    traceback.print_exc()
                why = f"ended early: {told(error) or str(error) or type(error).__name__}"
                if limit.expired():
                    why = f"ended early: not done within {arguments.limit:g} minutes (--limit)"
                sheet.add(
                    FaultFigure(section=name, name="the section itself", value=None, kept=False, note=why)
                )
            if left := await asyncio.to_thread(left_behind, mark):
                sheet.add(Plan(section=name).at_most("processes left behind", len(left), "", 0))
            say(f"{name}: {time.monotonic() - began:.0f} s")
    return whole


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
    parser.add_argument(
        "--only",
        type=some_of(SECTIONS),
        default=tuple(SECTIONS),
        metavar="NAMES",
        help="sections, with commas",
    )
    options = parser.parse_args()
    configure_logging(level="error")
    sheet = FaultSheet(options.out)
    try:
        ended = asyncio.run(measure(options, sheet))
    except asyncio.CancelledError:  # by Ctrl-C or SIGTERM
        sys.exit(f"interrupted; what was measured so far is in {options.out}")
    print(sheet.summary, file=sys.stderr)
    sys.exit(0 if ended else 1)


if __name__ == "__main__":
    main()
