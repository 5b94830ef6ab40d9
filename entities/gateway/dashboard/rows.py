"""Rows of the view model: an instance, node, job, fault or module in the JSON form that a browser gets. Pure.

Figures are rounded to what can be seen, so that a value that merely jitters makes no new row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, isfinite
from typing import Any

from schemas.actions import (
    Action,
    AvoidInstance,
    CheckpointNow,
    ExpectFailures,
    Migrate,
    MoveInstance,
    NoAction,
    RollBack,
    SetTraffic,
    SetWeights,
    UseBackup,
    knob_of,
    value_of,
)
from schemas.cluster import Cordon, NodeStatus, Slot
from schemas.data_plane import RouteEntry
from schemas.fault import FaultRecord
from schemas.gateway_api import JobSummary
from schemas.job import StepResult
from schemas.module_status import ModuleStatus
from schemas.queue import QueuePlace, SlotsReserved
from schemas.registry import ServiceRecord
from schemas.telemetry import InstanceSample, LinkFigures, NodeSample

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ViewTimes:
    """Over which times the view looks back, in seconds."""

    fresh_s: float = 15.0  # a sample older than this is not shown any more
    rate_s: float = 3.0  # time constant of the exponential smoothing of a link's bytes to a rate
    changes_s: float = 60.0  # over which changes of route tables are counted


@dataclass
class LinkRate:
    """The smoothed bytes per second of one link, and the figures that its sender reported last, at `at`."""

    per_s: float = 0.0
    figures: LinkFigures = field(default_factory=LinkFigures)
    at: float = float("-inf")


@dataclass
class LastReport:
    """An instance's last sample, with the time that it came, and the rates of its links.

    `stalled` is the smoothed share of time in which its microbatches waited for their data; None: unknown.
    """

    at: float
    sample: InstanceSample
    links: dict[str, LinkRate] = field(default_factory=dict)
    stalled: float | None = None
    times: ViewTimes = ViewTimes()

    def take(self, sample: InstanceSample, at: float) -> None:
        """Takes in one more sample; a sample of another incarnation drops the links' rates."""
        if sample.incarnation != self.sample.incarnation:
            self.links.clear()
            self.stalled = None
        faded = exp(-max(0.0, at - self.at) / self.times.rate_s)
        share = self._stalled_share(sample, at)
        if share is not None:
            self.stalled = share if self.stalled is None else share + faded * (self.stalled - share)
        for rate in self.links.values():
            rate.per_s *= faded
        for link in sample.links:
            rate = self.links.setdefault(link.peer, LinkRate())
            rate.per_s += link.sent_bytes / self.times.rate_s
            if link.figures is not None:
                rate.figures, rate.at = link.figures, at
        self.at, self.sample = at, sample

    def _stalled_share(self, sample: InstanceSample, at: float) -> float | None:
        """Of the time since the sample before, 0 to 1; None: the two do not say."""
        before = self.sample
        stalls = [
            each.data.stalled_s
            for each in (before, sample)
            if each.data is not None and each.data.stalled_s is not None
        ]
        if len(stalls) < 2 or at <= self.at or sample.incarnation != before.incarnation:
            return None
        return min(1.0, max(0.0, stalls[1] - stalls[0]) / (at - self.at))

    def says_of(self, record: ServiceRecord, now: float) -> bool:
        """Whether the sample is of this record's incarnation, and not old."""
        return now - self.at <= self.times.fresh_s and self.sample.incarnation == record.incarnation


def significant(value: float | None, digits: int = 3) -> float | None:
    """`value` rounded to `digits` significant digits; None if it is no finite number."""
    return None if value is None or not isfinite(value) else float(f"{value:.{digits}g}")


def rounded(value: float | None, digits: int = 2) -> float | None:
    """`value` rounded to `digits` decimals; None if it is no finite number, which JSON can't express."""
    return None if value is None or not isfinite(value) else round(value, digits)


def instance_row(
    record: ServiceRecord,
    report: LastReport | None,
    entries: Mapping[str, RouteEntry],
    share: float | None,
    now: float,
) -> Row:
    """The row of an instance.

    Args:
        record: its registry record.
        report: its last sample, if any; one that is old or of another incarnation is not shown.
        entries: its entries in the route tables, by the senders' cluster.
        share: its share of its stage's microbatches in the last steps, 0 to 1.
        now: seconds since the epoch.
    """
    row: Row = {
        "sid": record.sid,
        "job": record.job,
        "stage": record.stage,
        "cluster": record.endpoint.cluster,
        "node": record.endpoint.node,
        "state": record.state.value,
        "device": record.capability.device,
        "share": rounded(share, 3),
        "weight": _agreed({cluster: round(entry.weight, 3) for cluster, entry in entries.items()}),
        "why": {cluster: entry.reason for cluster, entry in sorted(entries.items())},
        "window": max((entry.window for entry in entries.values()), default=None),
        "reason": record.reason,
    }
    if report is not None and report.says_of(record, now):
        sample = report.sample
        row |= {
            "busy": rounded(sample.busy),
            "queue": sample.queue,
            "open": sample.in_flight,
            "service_ms": significant(sample.service_ms or None),
            "step": sample.step,
            "links": [
                [
                    peer,
                    significant(link.per_s, 2),
                    significant(link.figures.transfer_ms),
                    rounded(link.figures.loss, 3),
                    link.figures.trend,
                ]
                for peer, link in sorted(report.links.items())
                if link.per_s >= 1
            ],
        }
        if sample.device is not None and sample.device.temperature_c is not None:
            row["temperature_c"] = rounded(sample.device.temperature_c, 1)
        if sample.data is not None:
            row["stalled"] = rounded(report.stalled)
            row["stalled_s"] = rounded(sample.data.stalled_s, 1)
            row["read_bytes"] = {tier: significant(count) for tier, count in sample.data.read_bytes.items()}
    return row


def traffic_row(sample: InstanceSample) -> Row:
    """The bytes of an instance since its sample before, and how long a transfer took on average."""
    transfers = sum(link.transfers for link in sample.links)
    transfer_ms = sum(link.transfer_ms for link in sample.links)
    return {
        "sid": sample.sid,
        "sent_bytes": sum(link.sent_bytes for link in sample.links),
        "received_bytes": sum(link.received_bytes for link in sample.links),
        "transfer_ms": significant(transfer_ms / transfers) if transfers else None,
    }


def link_rows(job: str, report: LastReport, stages: Mapping[str, int | None], now: float) -> list[Row]:
    """The links of one sender, each beside the sender's other links to the same stage.

    Args:
        job: the sender's.
        report: its last sample and its links.
        stages: the stage of each instance that is there.
        now: seconds since the epoch; figures that are older than `fresh_s` give no row.
    """
    per_s: dict[int, float] = defaultdict(float)
    fresh: dict[int, dict[str, LinkRate]] = defaultdict(dict)
    for receiver, rate in sorted(report.links.items()):
        stage = stages.get(receiver)
        if stage is not None:
            per_s[stage] += rate.per_s
            if now - rate.at <= report.times.fresh_s:
                fresh[stage][receiver] = rate
    rows = []
    for stage, rates in sorted(fresh.items()):
        best = min((_transfer_ms(rate) for rate in rates.values()), default=inf)
        for receiver, rate in rates.items():
            rows.append(
                {
                    "job": job,
                    "sender": report.sample.sid,
                    "receiver": receiver,
                    "stage": stage,
                    **{
                        name: significant(value, 4) if isinstance(value, float) else value
                        for name, value in rate.figures.model_dump(mode="json").items()
                    },
                    "share": rounded(rate.per_s / per_s[stage], 3) if per_s[stage] >= 1 else None,
                    "beside_ms": rounded(_transfer_ms(rate) - best),
                }
            )
    return rows


def _transfer_ms(rate: LinkRate) -> float:
    return inf if rate.figures.transfer_ms is None else rate.figures.transfer_ms


def _agreed(values: Mapping[str, Any]) -> Any:
    """The routers' value if they agree; else each value with its cluster, as text."""
    different = list(dict.fromkeys(values.values()))
    if len(different) <= 1:
        return different[0] if different else None
    return "; ".join(f"from {cluster}: {value}" for cluster, value in sorted(values.items()))


def _speed(status: NodeStatus) -> float | None:
    """Sum of the relative speeds of a node's slots; None: they are not measured."""
    speeds = [speed for slot in status.slots if (speed := slot.speed.get("stage")) is not None]
    return sum(speeds) if speeds else None


def node_row(
    status: NodeStatus | None,
    place: tuple[str, str],
    sample: NodeSample | None,
    cordons: Iterable[Cordon],
    instances: int,
) -> Row:
    """The row of a node. `place`: cluster and node. Slots are None for a node that has not registered."""
    active = [cordon for cordon in cordons if not cordon.lifted]
    return {
        "cluster": place[0],
        "node": place[1],
        "slots": None if status is None else len(status.slots),
        "taken": None if status is None else sum(slot.busy_with is not None for slot in status.slots),
        "warm": None if status is None else status.warm,
        "speed": None if status is None else rounded(_speed(status)),
        "slot_bytes": None if status is None else sum(slot.memory_bytes for slot in status.slots),
        "bits": [] if status is None else sorted({slot.bits_class for slot in status.slots} - {""}),
        "judged": [] if status is None else [_judged(slot) for slot in status.slots if slot.condition],
        "labels": {} if status is None or not status.slots else status.slots[0].labels,
        "version": "" if status is None else status.version,
        "cpu": None if sample is None else rounded(sample.cpu),
        "memory": None if sample is None else _ratio(sample.memory_used_bytes, sample.memory_total_bytes),
        "instances": instances,
        "devices": [
            {
                "device": device.device,
                "utilization": rounded(device.utilization),
                "temperature_c": rounded(device.temperature_c, 1),
                "power_w": rounded(device.power_w, 1),
                "memory": _ratio(device.memory_used_bytes, device.memory_total_bytes),
            }
            for device in (sample.devices if sample else ())
        ],
        "cordons": [
            {"slot": cordon.slot, "reason": cordon.reason, "by": cordon.by, "progress": cordon.progress}
            for cordon in active
        ],
    }


def _judged(slot: Slot) -> Row:
    """What the node's agent (MIC) says of a slot's instance, or of the last one in it."""
    performance = rounded(slot.performance)
    return {
        "slot": slot.index,
        "sid": slot.busy_with,
        "condition": slot.condition,
        "performance": performance,
    }


def _ratio(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else round(used / total, 2)


def entity_row(record: ServiceRecord) -> Row:
    return {
        "sid": record.sid,
        "kind": record.kind.value,
        "cluster": record.endpoint.cluster,
        "node": record.endpoint.node,
        "state": record.state.value,
        "reason": record.reason,
    }


_JOB = dict.fromkeys(("job", "name", "state", "step", "steps", "reason"), True)


def job_row(summary: JobSummary) -> Row:
    alerts = {"__all__": {"kind", "subject", "text"}}
    return summary.model_dump(mode="json", include={**_JOB, "alerts": alerts})


def progress_row(job: str, steps: Sequence[StepResult], route_changes: int) -> Row:
    """How a job fares over the last committed steps, and how often its route tables changed in a minute."""
    last = steps[-1] if steps else None
    seconds = sum(step.step_s for step in steps)
    return {
        "job": job,
        "measured_steps": len(steps),
        "step": last.step + 1 if last else 0,
        "step_s": significant(last.step_s, 4) if last else None,
        "tokens_per_s": significant(sum(step.tokens for step in steps) / seconds, 4) if seconds > 0 else None,
        "loss": significant(last.loss, 6) if last else None,
        "route_changes_per_min": route_changes,
    }


_FAULT = {"id", "state", "kind", "reporter", "verdict", "reason", "action", "attempts", "limit"}


def fault_row(fault: FaultRecord) -> Row:
    return {
        **fault.model_dump(mode="json", include=_FAULT),
        **fault.task.model_dump(mode="json", include={"job", "sid", "stage", "step"}),
        "warning": fault.kind in ("slow", "stalled"),
        "opened_at": round(fault.opened_at, 3),
        "changed_at": round(fault.changed_at, 3),
    }


_MODULE = {
    *("module", "version", "state", "alive"),
    *("suggestions", "adopted", "declined", "strikes", "reason"),
}


def module_row(status: ModuleStatus) -> Row:
    return status.model_dump(mode="json", include=_MODULE)


def queue_row(place: QueuePlace) -> Row:
    """A waiting job or build; `expected_at`: when it may start, as far as that is known."""
    fields = {"position", "job", "work", "name", "user", "slots", "since", "reason", "expected_at"}
    return place.model_dump(mode="json", include=fields)


def reservation_row(record: SlotsReserved) -> Row:
    """Slots that are kept, from when until when, for whom, and who asked for it."""
    return {**record.spec.model_dump(mode="json"), "by": record.by}


def describe(action: Action) -> str:
    """The action that a module suggests, in words."""
    match action:
        case SetWeights(stage=stage, weights=weights):
            shown = ", ".join(f"{sid} {weight:.2f}" for sid, weight in sorted(weights.items())[:8])
            more = f" and {len(weights) - 8} more" if len(weights) > 8 else ""
            return f"weights of stage {stage}: {shown}{more}"
        case AvoidInstance(sid=sid):
            return f"avoid {sid}"
        case UseBackup(sid=sid, backup=backup):
            return f"{backup} in the place of {sid}"
        case MoveInstance(sid=sid, stage=stage):
            return f"move {sid} to stage {stage}"
        case ExpectFailures(between_s=between_s):
            return f"expect a failure every {between_s:.0f} s"
        case Migrate(sid=sid):
            return f"{sid} leaves its slot for {value_of(action)}"
        case CheckpointNow():
            return "a checkpoint now"
        case NoAction(note=note):
            return note or "no wish"
        case RollBack(service=service, version=version):
            return f"{version} of service {service} goes back"
        case SetTraffic(service=service):
            return f"traffic of service {service}: {value_of(action)}"
    return f"{knob_of(action)}: {value_of(action)}"
