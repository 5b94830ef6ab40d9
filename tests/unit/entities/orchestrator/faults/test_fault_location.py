"""What an orchestrator makes of a report, given what registry and node agent say (draft §5.5)."""

from __future__ import annotations

from typing import Literal

import pytest

from entities.orchestrator.faults.fault_location import judge_fault
from schemas.cluster import Judgement
from schemas.registry import InstanceState
from tests.builders.faults import fault_report
from tests.builders.steps import member

VICTIM = member()
Process = Literal["running", "stopped", "gone", "unknown"]


def judgement(process: Process) -> Judgement:
    return Judgement(
        sid=VICTIM.sid,
        incarnation=VICTIM.incarnation,
        process=process,
        scope="none",
        kind="transient",
        evidence="looked at",
    )


@pytest.mark.parametrize(
    ("kind", "state", "process", "verdict"),
    [
        ("link", InstanceState.ACTIVE, "running", "transient"),
        ("link", InstanceState.PENDING, "running", "transient"),
        ("link", InstanceState.ACTIVE, "gone", "structural"),
        ("link", InstanceState.ACTIVE, "stopped", "structural"),
        ("link", InstanceState.FAULTED, "running", "structural"),
        ("unreachable", InstanceState.ACTIVE, "running", "structural"),
        ("request", InstanceState.ACTIVE, "running", "unfounded"),
        ("instance", InstanceState.FAULTED, "running", "structural"),
    ],
)
def test_a_broken_link_alone_condemns_nobody(
    kind: Literal["instance", "link", "unreachable", "request"],
    state: InstanceState,
    process: Process,
    verdict: str,
) -> None:
    assert judge_fault(VICTIM, state, judgement(process), fault_report(kind)).verdict == verdict
