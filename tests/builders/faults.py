"""What is told of a fault, and what is made of it."""

from __future__ import annotations

from typing import Any

from schemas.fault import ClusterReport, FaultReport, FaultVerdict

INSTANCE = {"job": "j", "sid": "j-s0-r0", "incarnation": "i1"}


def fault_report(kind: str = "instance", **more: Any) -> FaultReport:
    fields = {"reporter": "router-east", "evidence": "seen"}
    return FaultReport.model_validate(INSTANCE | fields | {"kind": kind} | more)


def fault_verdict(verdict: str = "structural", **more: Any) -> FaultVerdict:
    fields = {"scope": "instance", "action": "replace", "reason": "process gone"}
    return FaultVerdict.model_validate(INSTANCE | fields | {"verdict": verdict} | more)


def cluster_report(
    sid: str = "j-s0-r0", condition: str = "stalled", *, waits_for: tuple[str, ...] = (), **more: Any
) -> ClusterReport:
    """What agent `a-n` says of an instance of job `j`."""
    chain = {"stage": 0, "replica": 0, "waits_for": waits_for}
    fields = {"agent": "a-n", "cluster": "a", "node": "n", "job": "j", "sid": sid, "incarnation": "i"}
    judged = {"condition": condition, "scope": "instance", "kind": "transient", "evidence": "looked at"}
    return ClusterReport.model_validate(fields | judged | {"chain": chain} | more)
