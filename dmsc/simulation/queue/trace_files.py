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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import BadInput

GAVEL_SPEEDS = "simulation_throughputs.json"
GAVEL_DEVICE = "v100"
COLUMNS = {
    "submit_s": ("submit_s", "submit_time"),
    "slots": ("slots", "num_gpu"),
    "run_s": ("run_s", "duration"),
}


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
        raise BadInput(f"{path}: the trace has no job")
    return sorted(lines, key=lambda line: (line.submit_s, line.job))


def _text(path: Path) -> str:
    if not path.exists() and path.with_name(path.name + ".gz").exists():
        path = path.with_name(path.name + ".gz")
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: can't be read: {error}") from error


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
                found = json.loads(_text(folder / name))[GAVEL_DEVICE]
                return {_gavel_key(key): alone["null"] for key, alone in found.items()}
    raise BadInput(f"{path}: a trace of Gavel needs {GAVEL_SPEEDS} beside it, or in the folder above")


def _gavel_key(key: str) -> tuple[str, int]:
    """`('ResNet-18 (batch size 16)', 1)` as a pair."""
    name, _, count = key[2:-1].rpartition("', ")
    return name, int(count)


def _table(path: Path, text: str) -> list[TraceLine]:
    rows = csv.DictReader(text.splitlines())
    columns = {
        meaning: next((name for name in names if name in (rows.fieldnames or ())), "")
        for meaning, names in COLUMNS.items()
    }
    if missing := [meaning for meaning, name in columns.items() if not name]:
        raise BadInput(
            f"{path}:1: no column {', '.join(missing)}: a trace has submit_s, slots, run_s, or is one of "
            "Gavel or Tiresias"
        )
    lines = []
    for number, row in enumerate(rows, start=2):
        try:
            line = TraceLine(
                job=row.get("job") or row.get("job_id") or f"job-{number - 1:05}",
                submit_s=float(row[columns["submit_s"]]),
                slots=int(row[columns["slots"]]),
                run_s=float(row[columns["run_s"]]),
                tenant=row.get("tenant") or "",
                priority=int(row.get("priority") or 0),
                least=int(row["min"]) if row.get("min") else None,
                most=int(row["max"]) if row.get("max") else None,
                deadline_s=float(row["deadline_s"]) if row.get("deadline_s") else None,
                after=tuple((row.get("after") or "").split()),
            )
        except (TypeError, ValueError) as error:
            raise BadInput(f"{path}:{number}: {error}") from None
        if line.slots < 1 or not (line.run_s > 0 and math.isfinite(line.run_s)):
            raise BadInput(f"{path}:{number}: {line.slots} slots for {line.run_s} s: both have to be above 0")
        if not (line.least or 1) <= line.slots <= (line.most or line.slots):
            raise BadInput(
                f"{path}:{number}: min {line.least}, slots {line.slots}, max {line.most}: give rising numbers"
            )
        lines.append(line)
    return lines
