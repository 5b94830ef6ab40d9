"""What faults cost: stalls, goodput, waste, hashes under kills, each figure beside its bar.

    python benchmarks/faults.py [--only stall,freeze,kills,goodput,stage,join,overhead,peers] [--seed 0]

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
from fault_figures import Figure, Plan, Sheet  # type: ignore[import-not-found,unused-ignore]  # beside this
from fault_sections import SECTIONS, say  # type: ignore[import-not-found,unused-ignore]  # beside this

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


async def measure(arguments: argparse.Namespace, sheet: Sheet) -> bool:
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
                traceback.print_exc()
                why = f"ended early: {str(error) or type(error).__name__}"
                if limit.expired():
                    why = f"ended early: not done within {arguments.limit:g} minutes (--limit)"
                sheet.add(Figure(section=name, name="the section itself", value=None, kept=False, note=why))
            if left := await asyncio.to_thread(left_behind, mark):
                sheet.add(Plan(section=name).at_most("processes left behind", len(left), "", 0))
            say(f"{name}: {time.monotonic() - began:.0f} s")
    return whole


def chosen(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in SECTIONS]
    if wrong or not names:
        raise argparse.ArgumentTypeError(f"{wrong or 'nothing'}: choose from {', '.join(SECTIONS)}")
    return names


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    whole = parser.add_argument_group("what")
    whole.add_argument(
        "--only", type=chosen, default=",".join(SECTIONS), metavar="NAMES", help="sections, with commas"
    )
    whole.add_argument("--seed", type=int, default=0, help="of the plans of faults")
    whole.add_argument("--limit", type=float, default=60.0, metavar="MINUTES", help="for a section")
    whole.add_argument("--out", type=Path, default=Path("runs/bench-faults.json"), metavar="FILE")
    sizes = parser.add_argument_group("how much")
    sizes.add_argument("--stalls", type=int, default=20, metavar="N", help="kills in `stall`")
    sizes.add_argument("--freezes", type=int, default=10, metavar="N")
    sizes.add_argument("--minutes", type=float, default=10.0, help="of oversubscription in `freeze`")
    sizes.add_argument("--kills", type=int, default=200, metavar="N", help="in the soak, 50 a job")
    sizes.add_argument("--stages", type=int, default=3, metavar="N", help="losses of a whole stage, each way")
    sizes.add_argument("--joins", type=int, default=8, metavar="N", help="kills in `join`")
    sizes.add_argument(
        "--seconds", type=float, default=90.0, help="of each run with a kill every 10 s: `goodput`, `peers`"
    )
    sizes.add_argument("--rounds", type=int, default=3, help="of `overhead` and `peers`, interleaved")
    arguments = parser.parse_args()
    configure_logging(level="error")
    sheet = Sheet(arguments.out)
    try:
        ended = asyncio.run(measure(arguments, sheet))
    except asyncio.CancelledError:  # by Ctrl-C or SIGTERM
        sys.exit(f"interrupted; what was measured so far is in {arguments.out}")
    print(
        f"{len(sheet.missed())} of {len(sheet.figures)} missed; written to {arguments.out}", file=sys.stderr
    )
    sys.exit(0 if ended else 1)


if __name__ == "__main__":
    main()
