"""What is told of a fault, and what is made of it."""

from __future__ import annotations

from typing import Any

from schemas.fault import FaultReport, FaultVerdict

INSTANCE = {"job": "j", "sid": "j-s0-r0", "incarnation": "i1"}


def fault_report(kind: str = "instance", **more: Any) -> FaultReport:
    fields = {"reporter": "router-east", "evidence": "seen"}
    return FaultReport.model_validate(INSTANCE | fields | {"kind": kind} | more)


def fault_verdict(verdict: str = "structural", **more: Any) -> FaultVerdict:
    fields = {"scope": "instance", "action": "replace", "reason": "process gone"}
    return FaultVerdict.model_validate(INSTANCE | fields | {"verdict": verdict} | more)
