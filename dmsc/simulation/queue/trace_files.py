"""Traces of jobs: those of Gavel and Tiresias, and tables of one's own.

Gavel's lines (OSDI 2020) have steps and the number of devices; how fast a step is says the file
`simulation_throughputs.json` of the same project, on a V100. Where it has no measurement of a job on several
devices, that of one device is taken. Tables are CSV with the columns `submit_s,slots,run_s`, and, if wanted,
`job,tenant,priority,min,max,deadline_s,after`; Tiresias' `submit_time,num_gpu,duration` will do.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from schemas.errors import BadInput

GAVEL_SPEEDS = "simulation_throughputs.json"
GAVEL_DEVICE = "v100"
COLUMNS = {
    "submit_s": ("submit_s", "submit_time"),
    "slots": ("slots", "num_gpu"),
    "run_s": ("run_s", "duration"),
}
MOST = 1e12
"""Of each number in a trace: some 30,000 years in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    """One job. `run_s`: seconds that it runs on `slots` slots; `least`, `most`: if the trace says so."""

    job: str
    submit_s: float
    slots: int
    run_s: float
    tenant: str = ""
    priority: int = 0
    least: int | None = None
    most: int | None = None
    deadline_s: float | None = None
    after: tuple[str, ...] = ()


def read_trace(path: Path) -> list[TraceLine]:
    """The jobs of a trace by their submission.

    Raises:
        BadInput: the file is missing or of another form; the text says which line, and what was expected.
    """
    text = _text(path)
    first = text.partition("\n")[0]
    lines = _gavel(path, text) if "\t" in first else _table(path, text)
    if not lines:
        raise BadInput(f"{path}: the trace has no job: give each a line of its own")
    _check_order(path, lines)
    return sorted(lines, key=lambda line: (line.submit_s, line.job))


def _check_order(path: Path, lines: Sequence[TraceLine]) -> None:
    """That each job has its own name, and comes after jobs of this trace, not after itself.

    Raises:
        BadInput: it is not so; the text names the jobs.
    """
    after = {line.job: line.after for line in lines}
    if len(after) < len(lines):
        ((twice, times),) = Counter(line.job for line in lines).most_common(1)
        raise BadInput(f"{path}: {times} jobs are called {twice}: give each a name of its own")
    for job, earlier in after.items():
        if unknown := [name for name in earlier if name not in after]:
            raise BadInput(
                f"{path}: {job} is after {unknown[0]}, which the trace does not have: add or drop it"
            )
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        cycle = " before ".join(error.args[1])
        raise BadInput(f"{path}: the column after has a cycle: {cycle}: drop one of them") from None


def _text(path: Path) -> str:
    if not path.exists() and path.with_name(path.name + ".gz").exists():
        path = path.with_name(path.name + ".gz")
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file: name a trace's file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadInput(f"{path}: not gzip ({error}): compress it anew, or give it without .gz") from error
    except OSError as error:
        raise BadInput(f"{path}: can't be read: {error.strerror}: name a trace's file") from error
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path}: not UTF-8 text (byte {error.start}): give CSV, or a trace of Gavel"
        ) from error


def _gavel(path: Path, text: str) -> list[TraceLine]:
    speeds = _gavel_speeds(path)
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.split("\t")
        try:
            kind, steps, submit_s, slots = cells[0], float(cells[4]), float(cells[5]), int(cells[6])
        except (IndexError, ValueError):
            raise BadInput(
                f"{path}:{number}: no line of Gavel: seven cells with tabs between, 5th to 7th steps, "
                "time of arrival, devices"
            ) from None
        if not (0 < steps <= MOST and abs(submit_s) <= MOST and slots > 0):
            raise BadInput(
                f"{path}:{number}: {steps:g} steps on {slots} devices from {submit_s:g} s: give "
                "finite numbers, of steps and devices above 0"
            )
        speed = speeds.get((kind, slots)) or speeds.get((kind, 1))
        if not speed:
            raise BadInput(f"{path}:{number}: {GAVEL_SPEEDS} has no speed of {kind} on {GAVEL_DEVICE}")
        lines.append(TraceLine(job=f"job-{number:05}", submit_s=submit_s, slots=slots, run_s=steps / speed))
    return lines


def _gavel_speeds(path: Path) -> Mapping[tuple[str, int], float]:
    """Steps per second alone on a device, by (model, devices)."""
    for folder in (path.parent, path.parent.parent):
        for name in (GAVEL_SPEEDS, f"gavel_{GAVEL_SPEEDS}"):
            if (folder / name).exists() or (folder / f"{name}.gz").exists():
                text = _text(folder / name)
                try:
                    found = json.loads(text)[GAVEL_DEVICE]
                    return {_gavel_key(key): float(alone["null"]) for key, alone in found.items()}
                except (ValueError, LookupError, TypeError, AttributeError):
                    raise BadInput(
                        f"{folder / name}: no speeds of {GAVEL_DEVICE} as Gavel has them: fetch the file anew"
                    ) from None
    raise BadInput(f"{path}: a trace of Gavel needs {GAVEL_SPEEDS} beside it, or in the folder above")


def _gavel_key(key: str) -> tuple[str, int]:
    """`('ResNet-18 (batch size 16)', 1)` as a pair."""
    name, _, count = key[2:-1].rpartition("', ")
    return name, int(count)


def _table(path: Path, text: str) -> list[TraceLine]:
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    columns = {
        meaning: next((name for name in names if name in (rows.fieldnames or ())), "")
        for meaning, names in COLUMNS.items()
    }
    if missing := [meaning for meaning, name in columns.items() if not name]:
        raise BadInput(
            f"{path}:1: no column {', '.join(missing)}: a trace has submit_s, slots, run_s, or is one of "
            "Gavel or Tiresias"
        )
    return [
        _table_line(f"{path}:{rows.line_num}", columns, row, number)
        for number, row in enumerate(rows, start=1)
    ]


def _table_line(at: str, columns: Mapping[str, str], row: Mapping[str, str], number: int) -> TraceLine:
    def cell(column: str) -> float | None:
        text = row.get(columns.get(column, column)) or ""
        if not text and column not in columns:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= MOST:  # nan, too
            raise BadInput(f"{at}: {column} is {text or 'missing'}: give a number up to {MOST:g}")
        return value

    def whole(column: str) -> int | None:
        value = cell(column)
        if value is not None and value != int(value):
            raise BadInput(f"{at}: {column} is {value:g}: give a whole number")
        return None if value is None else int(value)

    submit_s, slots, run_s = cell("submit_s") or 0.0, whole("slots") or 0, cell("run_s") or 0.0
    least, most, deadline_s = whole("min"), whole("max"), cell("deadline_s")
    if slots < 1 or run_s <= 0:
        raise BadInput(f"{at}: {slots} slots for {run_s} s: both have to be above 0")
    if not 1 <= (1 if least is None else least) <= slots <= (slots if most is None else most):
        raise BadInput(f"{at}: min {least}, slots {slots}, max {most}: give 1 ≤ min ≤ slots ≤ max")
    return TraceLine(
        job=row.get("job") or row.get("job_id") or f"job-{number:05}",
        submit_s=submit_s,
        slots=slots,
        run_s=run_s,
        tenant=row.get("tenant") or "",
        priority=whole("priority") or 0,
        least=least,
        most=most,
        deadline_s=deadline_s,
        after=tuple((row.get("after") or "").split()),
    )
