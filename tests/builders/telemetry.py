"""What instances, routers and devices measure."""

from __future__ import annotations

from typing import Any

from schemas.registry import InstanceState
from schemas.signals import ComputeEntry, QosReport
from schemas.telemetry import InstanceSample, LinkSample
from tests.builders.records import instance


def sample(sid: str = "j-s0-r0", **more: Any) -> InstanceSample:
    """Of an instance that has computed four microbatches of 10 ms; job and stage come from the SID."""
    record = instance(sid)
    fields = {
        "job": record.job,
        "incarnation": "i1",
        "cluster": "east",
        "node": "n1",
        "stage": record.stage,
        "step": 1,
        "service_ms": 10.0,
        "microbatches": 4,
    }
    return InstanceSample(sid=sid, **(fields | more))


def linked_sample(sid: str = "j-s0-r0", **more: Any) -> InstanceSample:
    """A sample with one link: 10 transfers of 2 ms, 1 kB each; 5 ms per microbatch."""
    fields = {
        "node": "east-n1",
        "microbatches": 0,
        "service_ms": 5.0,
        "tokens_per_s": 100.0,
        "links": (LinkSample(peer="j-s1-r0", sent_bytes=10_000, transfers=10, transfer_ms=20.0),),
    }
    return sample(sid, **(fields | more))


def compute(sid: str = "j-s0-r0", **more: Any) -> ComputeEntry:
    """A stage-0 instance in Type 4: idle, 5 ms."""
    fields = {"job": "j", "stage": 0, "incarnation": "i1", "state": InstanceState.ACTIVE, "service_ms": 5.0}
    return ComputeEntry(sid=sid, **(fields | more))


def qos_report(**figures: Any) -> QosReport:
    """Type 5 of a cluster's router."""
    return QosReport(**{"sid": "router-a", "cluster": "a", "window_s": 1.0, "job": "j"} | figures)
