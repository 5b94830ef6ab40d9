"""Whether a job goes on at the edges: the server stands still, its disk is full, values are garbage, no room.

    python -m benchmarks.soak_edges [--runs 20] [--seed 1] [--minutes 9] [--keep runs/soak-edges] [--json]

Each run is one `dmsc chaos --private`: a mesh of its own, a padded 2 × 2 job, and each of the kinds once, in
an order and at moments that the run's seed draws. The first run is compared with an undisturbed one, the
others with the first one's weights. What a run came to is kept at once, so that the same command goes on
where it left off: `--minutes` begins no run after so many, `--runs` asks for more. Exit code 1 if a job
failed, an instance was evicted that no fault had struck, weights differ, a fault did not fire, or the job
took longer than `GOES_ON_MOST_S` to go on after one. Small disks are mounted, which takes root.

When the job goes on is the first step committed after a fault is over: after the server goes on, after there
is room on the disk, after the instance was killed or the value overwritten.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import command
from dmsc.chaos.plan import ChaosTimes, FaultKind
from dmsc.chaos.report import quantile
from dmsc.console.options import print_table

ROOT = Path(__file__).resolve().parents[1]
KINDS = (FaultKind.SERVER_FREEZE, FaultKind.DISK_FULL, FaultKind.GARBAGE_VALUE, FaultKind.NO_ROOM)
LASTS_S: Mapping[FaultKind, float] = {
    FaultKind.SERVER_FREEZE: ChaosTimes().hold_s,
    FaultKind.DISK_FULL: ChaosTimes().full_s,
}
"""When a fault is over by itself; one that is not named is at once."""
JOB = ("examples/chaos-gpt.yaml", "--set", "training.steps=300")
"""The last fault comes at 100 s, and the job trains for longer than that."""
EVERY = "25s"
GOES_ON_MOST_S = 10.0
"""From the end of a fault to the next committed step: with room on the disk, with the server heard again."""
MOST_S = 420.0
"""A run that takes longer is ended, and counts as failed."""
STOP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run came to. `goes_on_s`: by kind of fault, from its end until the next step was committed."""

    seed: int
    fired: dict[str, int]
    state: str
    problems: tuple[str, ...]
    false_evictions: int
    sha256: str | None
    goes_on_s: dict[str, list[float]]


def run_of(seed: int, report: Mapping[str, Any]) -> Run:
    """Out of what `dmsc chaos --json` tells."""
    fired = {kind.value: 0 for kind in KINDS}
    goes_on_s: dict[str, list[float]] = {kind.value: [] for kind in KINDS}
    for fault in report["faults"]:
        if not fault["fired"]:
            continue
        fired[fault["kind"]] += 1
        over = fault["at"] + LASTS_S.get(FaultKind(fault["kind"]), 0.0)
        commits = [ended - over for _, _, ended in report["timeline"] if ended > over]
        goes_on_s[fault["kind"]] += commits[:1]
    return Run(
        seed=seed,
        fired=fired,
        state=report["state"],
        problems=tuple(report["problems"]),
        false_evictions=report["false_evictions"],
        sha256=report["sha256"],
        goes_on_s=goes_on_s,
    )


def broken(seed: int, why: str) -> Run:
    """A run that told nothing."""
    none = {kind.value: 0 for kind in KINDS}
    return Run(
        seed=seed, fired=none, state="unknown", problems=(why,), false_evictions=0, sha256=None, goes_on_s={}
    )


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The table: a line for each kind, and one for all."""
    table = []
    for kind in KINDS:
        found = [value for run in runs for value in run.goes_on_s.get(kind, ())]
        figures = [f"{quantile(found, q):.1f} s" if found else "–" for q in (0.5, 1.0)]
        table.append((kind.value, str(sum(run.fired[kind] for run in runs)), *figures, "", "", ""))
    equal = sum(run.sha256 is not None and run.sha256 == runs[0].sha256 for run in runs)
    table.append(
        (
            "all",
            str(sum(sum(run.fired.values()) for run in runs)),
            "",
            "",
            str(sum(run.state != "done" for run in runs)),
            str(sum(run.false_evictions for run in runs)),
            f"{equal} of {len(runs)}",
        )
    )
    return table


def flaws(runs: Sequence[Run]) -> list[str]:
    """What is wrong, one line each."""
    found = [f"seed {run.seed}: {problem}" for run in runs for problem in run.problems]
    for run in runs:
        if run.false_evictions:
            found.append(f"seed {run.seed}: {run.false_evictions} instances were evicted without a fault")
        if run.state == "done" and run.sha256 != runs[0].sha256:
            found.append(f"seed {run.seed}: the weights differ")
        if run.state == "done" and (missed := [kind for kind in KINDS if not run.fired[kind]]):
            found.append(f"seed {run.seed}: {', '.join(missed)} did not come about")
        for kind, found_s in run.goes_on_s.items():
            if (worst := max(found_s, default=0.0)) > GOES_ON_MOST_S:
                found.append(
                    f"seed {run.seed}: {worst:.1f} s after {kind} until the job went on, and "
                    f"{GOES_ON_MOST_S:g} s is the most"
                )
    return found


class Kept:
    """What the runs so far came to (`soak.json`); beside it what each run said, and its report."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._file = folder / "soak.json"
        self._plan = {"job": list(JOB), "every": EVERY, "kinds": [kind.value for kind in KINDS], "seed": seed}
        self.runs: list[Run] = []
        if self._file.exists():
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if kept["plan"] != self._plan:
                raise SystemExit(f"{self._file} is of another job, plan or seed: name another --keep")
            self.runs = [Run(**{**run, "problems": tuple(run["problems"])}) for run in kept["runs"]]

    def add(self, run: Run) -> None:
        self.runs.append(run)
        kept = {"plan": self._plan, "runs": [asdict(run) for run in self.runs]}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.with_suffix(".new").write_text(json.dumps(kept, indent=1), encoding="utf-8")
        self._file.with_suffix(".new").replace(self._file)

    def log(self, seed: int) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"seed-{seed}.log"


def one_run(seed: int, log: Path, *, reference: bool) -> Run:
    """`dmsc chaos` with this seed; what it says goes into `log`."""
    command = [
        *(sys.executable, "-m", "dmsc", "chaos", *JOB, "--private", "--json", "--seed", str(seed)),
        *("--every", EVERY, "--faults", str(len(KINDS)), "--what", ",".join(KINDS)),
        *(() if reference else ("--no-reference",)),
    ]
    with log.open("w", encoding="utf-8") as said:
        chaos = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True)
    late = False
    while True:
        try:
            told, _ = chaos.communicate(timeout=STOP_S if late else MOST_S)
            break
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            if late:
                chaos.kill()
            chaos.send_signal(signal.SIGINT)  # it stops its mesh and unmounts its disk
            late = True
            if isinstance(error, KeyboardInterrupt):
                chaos.communicate(timeout=STOP_S)
                raise
    if late:
        return broken(seed, f"no end within {MOST_S:.0f} s: {log}")
    log.with_suffix(".json").write_text(told, encoding="utf-8")
    try:
        return run_of(seed, json.loads(told))
    except ValueError:
        return broken(seed, f"exit code {chaos.returncode} without a report: {log}")


def main() -> int:
    parser = command(
        __doc__,
        runs=(20, "in all, those that are kept included"),
        seed=(1, "of the first run; each next one has the next", 0),
        keep=(Path("runs/soak-edges"), "folder; goes on from it"),
    )
    parser.add_argument("--minutes", type=float, default=None, help="begin no run after so many")
    options = parser.parse_args()
    kept, began = Kept(options.keep, options.seed), time.monotonic()
    while len(kept.runs) < options.runs:
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            break
        seed = options.seed + len(kept.runs)
        try:
            kept.add(one_run(seed, kept.log(seed), reference=not kept.runs))
        except KeyboardInterrupt:  # that run counts for nothing; what was kept is told
            break
        run = kept.runs[-1]
        print(f"seed {seed}: {run.state}, {sum(run.fired.values())} faults", file=sys.stderr, flush=True)
    if not kept.runs:
        return 0
    if options.json:
        print(json.dumps([asdict(run) for run in kept.runs], indent=1))
    else:
        columns = (
            "fault",
            "injected",
            "goes on after (p50)",
            "worst",
            "jobs failed",
            "false evictions",
            "sha256 equal",
        )
        print_table(columns, rows(kept.runs))
    found = flaws(kept.runs)
    for line in found:
        print(line, file=sys.stderr)
    if len(kept.runs) < options.runs:
        print(f"{len(kept.runs)} of {options.runs} runs; the same command goes on", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
