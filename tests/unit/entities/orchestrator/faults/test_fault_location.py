"""What an orchestrator makes of a report, given what registry and node agent say (draft §5.5)."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from entities.orchestrator.faults.fault_location import judge_fault
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import Judgement
from schemas.registry import InstanceState
from tests.builders.faults import fault_report
from tests.builders.graphs import node
from tests.builders.steps import member

VICTIM = member()
Process = Literal["running", "stopped", "gone", "unknown"]


def judgement(process: Process, **more: Any) -> Judgement:
    fields = {"scope": "none", "kind": "transient", "evidence": "looked at"} | more
    return Judgement(sid=VICTIM.sid, incarnation=VICTIM.incarnation, process=process, **fields)


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


class TestTheClustersJudgement:
    """§5.5: the MIC says how far a fault reaches, and which dependencies it broke."""

    def test_its_scope_is_that_of_the_verdict(self) -> None:
        alone = judge_fault(
            VICTIM, InstanceState.FAULTED, judgement("gone", scope="instance"), fault_report("link")
        )
        with_its_node = judge_fault(
            VICTIM, InstanceState.FAULTED, judgement("gone", scope="node"), fault_report("link")
        )
        assert (alone.scope, alone.action) == ("instance", "replace")
        assert (with_its_node.scope, with_its_node.action) == ("node", "replace on another node")
        assert "can start no instance" in with_its_node.reason

    def test_broken_dependencies_are_told(self) -> None:
        broken = ("stage 0 -> j-s1-r0: 512 bytes a microbatch",)
        found = judge_fault(
            VICTIM, InstanceState.FAULTED, judgement("gone", broken=broken), fault_report("link")
        )
        assert found.broken == broken
        assert judge_fault(VICTIM, InstanceState.ACTIVE, None, fault_report("link")).broken == ()


async def test_a_node_that_was_judged_lost_gets_nothing_until_it_is_warm() -> None:
    mesh = MeshView()
    await mesh.node(node("a"))
    await mesh.node(node("b"))
    mesh.judged_lost("a-n")
    assert [status.sid for status in mesh.open_nodes()] == ["b-n"]
    await mesh.node(node("a").model_copy(update={"warm": False}))
    assert [status.sid for status in mesh.open_nodes()] == ["b-n"]
    await mesh.node(node("a"))
    assert [status.sid for status in mesh.open_nodes()] == ["a-n", "b-n"]
