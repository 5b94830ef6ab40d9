"""Today's software beside a commit of before: what the guard of the bus costs now, and what it did then.

    python -m benchmarks.side_by_side [--from COMMIT] [--pairs 7] [--only connect,messages] [--json]

The software of COMMIT is taken out of git's history into a folder of its own. Each pair measures both, one
child process after the other with that folder, or this one, as its import path; who goes first alternates.
Whatever else the machine does hits both, so each pair's ratio is taken, and the median and the range of the
ratios are printed beside the bars. The packages are those of the present environment for both.

* connect: a `Bus` from nothing to connected through the guard, p50 (`benchmarks/doors.py` of either)
* publish, consume: typed messages on a plain bus; claims, notices, samples: on a guarded bus, to the handler
  (today's `benchmarks/message_cost.py`). Judged by time on the processor per message, which the rate follows
  from on an idle machine and does not on a busy one; the rates' ratio is printed behind it.

Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import command, some_of
from benchmarks.history import BEFORE, ROOT, taken_out

MOST_S = 300.0
"""What one child process may take."""
PAIRS = 7


@dataclass(frozen=True, slots=True)
class Bar:
    """`most`: how many times as long as before something may take."""

    most: float
    words: str


CONNECTING = Bar(1.5, "≤ 1.5×")
SPEED = Bar(1.05, "≤ 5 % slower")
BARS = {
    "connect": CONNECTING,
    **dict.fromkeys(("publish", "consume", "claims", "notices", "samples"), SPEED),
}
Times = dict[str, tuple[float, float]]
"""By figure, in seconds of one connection or message: what is judged, and by the clock."""


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark of which both sides run a process. `own`: each side its own script; else both today's."""

    script: str
    arguments: tuple[str, ...]
    own: bool

    def command(self, software: Path) -> list[str]:
        script = (software if self.own else ROOT) / "benchmarks" / self.script
        return [sys.executable, str(script), *self.arguments, "--json"]


PARTS = {
    "connect": Part("doors.py", ("--rounds", "2", "--connections", "40", "--requests", "50"), own=True),
    "messages": Part("message_cost.py", ("--rounds", "30", "--messages", "1500"), own=False),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure over all pairs. `median`, `least` and `most` are of today's time as a share of before's;
    `by_the_clock` is the median where something else is judged."""

    before_s: float
    today_s: float
    median: float
    least: float
    most: float
    by_the_clock: float
    met: bool


# --- pure --------------------------------------------------------------------------------------------------
def orders(pairs: int) -> Iterator[tuple[str, str]]:
    """Who goes first."""
    for number in range(pairs):
        yield ("today", "before") if number % 2 else ("before", "today")


def times_of(part: str, report: Mapping[str, Any]) -> Times:
    """What a child has printed, as times.

    Raises:
        KeyError: it printed something else.
    """
    if part == "connect":
        took = report["connect"]["guarded_ms"] / 1e3
        return {"connect": (took, took)}
    return {name: (one["cpu_s"], 1 / one["per_s"]) for name, one in report["figures"].items()}


def verdict(name: str, pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> Verdict:
    """Of (before, today) of each pair."""
    ratios = [today[0] / before[0] for before, today in pairs]
    median = statistics.median(ratios)
    return Verdict(
        before_s=statistics.median(before[0] for before, _ in pairs),
        today_s=statistics.median(today[0] for _, today in pairs),
        median=median,
        least=min(ratios),
        most=max(ratios),
        by_the_clock=statistics.median(today[1] / before[1] for before, today in pairs),
        met=median <= BARS[name].most,
    )


def table(verdicts: Mapping[str, Verdict]) -> Iterable[str]:
    yield f"{'':9}{'before':>10}{'today':>10}   today takes (range over pairs)"
    for name, one in verdicts.items():
        connecting = name == "connect"
        shown = [
            f"{time_s * 1e3:.2f} ms" if connecting else f"{time_s * 1e6:.2f} µs"
            for time_s in (one.before_s, one.today_s)
        ]
        clock = "" if connecting else f"   ({one.by_the_clock:.3f}× by the clock)"
        yield (
            f"{name:9}{shown[0]:>10}{shown[1]:>10}   {one.median:.3f}× ({one.least:.3f}–{one.most:.3f})   "
            f"bar {BARS[name].words}: {'met' if one.met else 'MISSED'}{clock}"
        )


# --- processes ---------------------------------------------------------------------------------------------
def measured(name: str, software: Path) -> Times:
    """One child process of a part, on this software.

    Raises:
        SystemExit: it failed, in one line.
    """
    part = PARTS[name]
    command = part.command(software)
    if not Path(command[1]).exists():
        raise SystemExit(f"{software.name} has no benchmarks/{part.script}: compare with a later commit")
    try:
        done = subprocess.run(
            command,
            cwd=software,
            env={**os.environ, "PYTHONPATH": str(software)},
            capture_output=True,
            text=True,
            timeout=MOST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{part.script} on {software.name}: no end after {MOST_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SystemExit(f"{part.script} on {software.name}: exit code {done.returncode}: {last[:300]}")
    report = json.loads(done.stdout)
    if not part.own and Path(report["software"]) != software.resolve():
        raise SystemExit(f"{part.script} ran on {report['software']}, not on {software}")
    return times_of(name, report)


def compared(before: Path, parts: Sequence[str], pairs: int) -> dict[str, Verdict]:
    """All pairs of all parts."""
    sides = {"before": before, "today": ROOT}
    found: dict[str, list[tuple[tuple[float, float], tuple[float, float]]]] = {}
    for number, order in enumerate(orders(pairs)):
        for part in parts:
            times = {side: measured(part, sides[side]) for side in order}
            for name in times["today"]:
                found.setdefault(name, []).append((times["before"][name], times["today"][name]))
        print(f"pair {number + 1} of {pairs}", file=sys.stderr, flush=True)
    return {name: verdict(name, found[name]) for name in BARS if name in found}


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command(__doc__)
    parser.add_argument("--from", dest="commit", default=BEFORE, help="with which software")
    parser.add_argument("--pairs", type=_count, default=PAIRS)
    parser.add_argument(
        "--only", type=some_of(PARTS), default=tuple(PARTS), metavar="PART,…", help=", ".join(PARTS)
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dmsc-before-") as temporary:
        before = Path(temporary) / options.commit[:12].replace("/", "-")
        taken_out(options.commit, before)
        verdicts = compared(before, options.only, options.pairs)
    if options.json:
        print(json.dumps({name: asdict(one) for name, one in verdicts.items()}, indent=1))
    else:
        print(*table(verdicts), sep="\n")
    return 0 if all(one.met for one in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
