"""Counters of router ports with timestamped events, in the form of cisco-ie/telemetry's subset.

NAME.events.csv             timestamp,event,duration,device,interface,comment; seconds since the epoch
NAME__DEVICE.counters.csv   time,interface,…,carrier-transitions,packets-received,packets-sent: counters
                            that only grow, about every 10 s; UTC; gzipped or not
cdp_map.json                devices → interface → target_device, target_port
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.policy_data.forms import WrongForm, read_json, read_text

Floats = NDArray[np.float64]
Port = tuple[str, str]
"""Device and interface."""

PERIOD_S = 10.0
COLUMNS = ("time", "interface", "carrier-transitions", "packets-received", "packets-sent")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that was done to the network at a moment; `port` has empty texts where it has none."""

    at: float
    kind: str
    port: Port


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One recording, resampled to a grid: at each moment what was last known of each port.

    Attributes:
        times: `(times,)`, seconds since the epoch, `PERIOD_S` apart.
        packets: `(times, ports, 2)`, received and sent per second.
        carrier: `(times, ports)`, carrier transitions since the moment before.
        samples: `(times, ports)`, how many samples of the port there were until then.
        sampled: `(times, ports)`, when the last of them was taken.
    """

    name: str
    ports: tuple[Port, ...]
    events: tuple[Event, ...]
    times: Floats
    packets: Floats
    carrier: Floats
    samples: NDArray[np.int64]
    sampled: Floats


def load_links(path: Path) -> dict[Port, Port]:
    """Port → the port at the other end of its cable.

    Raises:
        WrongForm: missing, or of another form.
    """
    try:
        devices = read_json(path)["devices"]
        return {
            (device, interface): (end["target_device"], end["target_port"])
            for device, interfaces in devices.items()
            for interface, end in interfaces.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise WrongForm(path, f"not devices → interface → target_device, target_port: {error!r}") from error


def load_experiments(folder: Path) -> list[Experiment]:
    """All recordings of a folder, by name.

    Raises:
        WrongForm: there is none, or one is of another form.
    """
    names = sorted(path.name.removesuffix(".events.csv") for path in folder.glob("*.events.csv"))
    if not names:
        raise WrongForm(folder, "no *.events.csv in it")
    return [load_experiment(folder, name) for name in names]


def load_experiment(folder: Path, name: str) -> Experiment:
    """One recording.

    Raises:
        WrongForm: it has no counters, a column is missing, or a value is no number.
    """
    files = sorted(folder.glob(f"{name}__*.counters.csv*"))
    if not files:
        raise WrongForm(folder / f"{name}__*.counters.csv", "no such file")
    series: dict[Port, list[list[float]]] = {}
    for file in files:
        device = file.name.split("__")[1].split(".")[0]
        for number, row in _rows(file, COLUMNS):
            try:
                at = datetime.fromisoformat(row["time"]).replace(tzinfo=UTC).timestamp()
                counters = [float(row[column]) for column in COLUMNS[2:]]
            except ValueError as error:
                raise WrongForm(file, str(error), line=number) from error
            series.setdefault((device, row["interface"]), []).append([at, *counters])
    events = tuple(_events(folder / f"{name}.events.csv"))
    tables = {port: np.array(rows) for port, rows in sorted(series.items()) if len(rows) > 2}
    if not tables:
        raise WrongForm(files[0], "fewer than three samples of every port")
    begin = max(table[1, 0] for table in tables.values())
    end = max(table[-1, 0] for table in tables.values())
    times = np.arange(begin, end + PERIOD_S, PERIOD_S)
    packets = np.zeros((len(times), len(tables), 2))
    carrier = np.zeros((len(times), len(tables)))
    samples = np.zeros((len(times), len(tables)), dtype=np.int64)
    sampled = np.zeros((len(times), len(tables)))
    for at, table in enumerate(tables.values()):
        passed = np.maximum(np.diff(table[:, 0]), 1e-3)
        rates = np.maximum(np.diff(table[:, 2:], axis=0), 0.0) / passed[:, None]  # a counter that restarts
        last = np.clip(np.searchsorted(table[:, 0], times, side="right") - 1, 1, len(table) - 1)
        packets[:, at] = rates[last - 1]
        carrier[:, at] = np.diff(table[last, 1], prepend=table[last[0], 1])
        samples[:, at], sampled[:, at] = last + 1, table[last, 0]
    return Experiment(
        name=name,
        ports=tuple(tables),
        events=events,
        times=times,
        packets=packets,
        carrier=carrier,
        samples=samples,
        sampled=sampled,
    )


def _events(path: Path) -> list[Event]:
    found = []
    for number, row in _rows(path, ("timestamp", "event", "device", "interface")):
        try:
            at = float(row["timestamp"])
        except ValueError as error:
            raise WrongForm(path, str(error), line=number) from error
        found.append(Event(at=at, kind=row["event"], port=(row["device"] or "", row["interface"] or "")))
    return found


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(read_text(path)))
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise WrongForm(path, f"no column {', '.join(missing)}", line=1)
    rows = [(number, row) for number, row in enumerate(reader, 2)]
    short = [number for number, row in rows if any(row[column] is None for column in columns)]
    if short:
        raise WrongForm(path, "too few columns", line=short[0])
    return rows
