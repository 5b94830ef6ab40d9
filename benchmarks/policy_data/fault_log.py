"""Faults of a cluster's nodes, in the form of stepfun-ai/InfiniteHBD-Trace.

A JSON list of {"node_id", "event_time" (days), "event_type": "fault_start" | "fault_end", "fault_type":
{"Level", "Class", "Desc"}}; gzipped or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.policy_data.forms import WrongForm, read_json

FILE = Path("failures/infinitehbd_fault_trace.json.gz")
DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedFault:
    """One fault; `end_day` None: the log ends before it does."""

    node: str
    start_day: float
    end_day: float | None
    level: str
    kind: str
    description: str

    @property
    def what(self) -> str:
        """Kind and description."""
        return f"{self.kind}: {self.description}"

    @property
    def began_s(self) -> float:
        return DAY_S * self.start_day

    @property
    def ended_s(self) -> float:
        """Infinite where the log ends before it does."""
        return math.inf if self.end_day is None else DAY_S * self.end_day


def load_faults(path: Path) -> list[LoggedFault]:
    """All faults in order of their start; each end belongs to the node's open fault of the same type.

    Raises:
        WrongForm: missing, of another form, or without a fault.
    """
    events = read_json(path)
    if not isinstance(events, list):
        raise WrongForm(path, "not a list of events")
    found: list[LoggedFault] = []
    opened: dict[tuple[str, ...], list[int]] = {}
    for number, event in enumerate(events):
        try:
            kind = event["fault_type"]
            key = (event["node_id"], kind["Level"], kind["Class"], kind["Desc"])
            day, what = float(event["event_time"]), event["event_type"]
        except (KeyError, TypeError, ValueError) as error:
            raise WrongForm(path, f"event {number} is of another form: {error!r}") from error
        if what == "fault_start":
            opened.setdefault(key, []).append(len(found))
            found.append(
                LoggedFault(
                    node=key[0], start_day=day, end_day=None, level=key[1], kind=key[2], description=key[3]
                )
            )
        elif opened.get(key):
            place = opened[key].pop(0)
            old = found[place]
            found[place] = LoggedFault(
                node=old.node,
                start_day=old.start_day,
                end_day=day,
                level=old.level,
                kind=old.kind,
                description=old.description,
            )
    if not found:
        raise WrongForm(path, "no fault_start in it")
    return sorted(found, key=lambda fault: fault.start_day)
