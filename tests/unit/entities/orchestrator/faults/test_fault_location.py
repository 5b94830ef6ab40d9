"""What an orchestrator makes of a report, given what registry and node agent say (draft §5.5)."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from entities.orchestrator.faults.fault_location import in_words, judge_fault
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import Judgement
from schemas.registry import InstanceState
from tests.builders.faults import cluster_report, fault_report
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


class TestTheClustersDetectors:
    """§5.5: what the MIC says of a living process decides; without it, it is taken for a healthy one."""

    def test_taking_its_judgement_away_changes_the_choice(self) -> None:
        stalled = judgement("running", condition="stalled", scope="instance", kind="structural")
        report = fault_report("stalled")
        found = judge_fault(VICTIM, InstanceState.ACTIVE, stalled, report)
        assert (found.verdict, found.scope, found.action) == ("structural", "instance", "fence and replace")
        assert found.reason == "process running, registry active, and stalled: looked at"
        for condition in ("", "well", "underperforming"):
            healthy = stalled.model_copy(update={"condition": condition})
            assert judge_fault(VICTIM, InstanceState.ACTIVE, healthy, report).verdict == "unfounded"

    def test_what_may_go_on_is_waited_for(self) -> None:
        stalled = judgement("running", condition="stalled", scope="instance")
        found = judge_fault(VICTIM, InstanceState.ACTIVE, stalled, fault_report("stalled"))
        assert (found.verdict, found.action) == ("transient", "it is waited for")
        gone = judge_fault(VICTIM, InstanceState.FAULTED, stalled, fault_report("instance"))
        assert gone.verdict == "structural", "the registry knows more"

    def test_a_stopped_process_needs_no_other_word(self) -> None:
        stopped = judgement("stopped", condition="stalled", scope="instance")
        found = judge_fault(VICTIM, InstanceState.ACTIVE, stopped, fault_report("stalled"))
        assert (found.verdict, found.scope) == ("structural", "instance")
        silent = judge_fault(VICTIM, InstanceState.ACTIVE, judgement("stopped"), fault_report("stalled"))
        assert silent.verdict == "unfounded"

    def test_an_underperforming_one_is_no_fault(self) -> None:
        slow = judgement("running", condition="underperforming")
        assert judge_fault(VICTIM, InstanceState.ACTIVE, slow, fault_report("slow")).verdict == "transient"

    def test_the_words_say_who_judged_what(self) -> None:
        stalled = judgement("running", condition="stalled", scope="instance", waiting=("j-s0-r1",))
        assert in_words("a-n", stalled) == (
            "a-n: stalled, process running, scope instance, transient; j-s0-r1 wait for it"
        )
        assert in_words("a-n", None) == ""

    def test_other_clusters_say_who_waits(self) -> None:
        mesh = MeshView()
        waits = cluster_report("j-s1-r0", scope="none", waits_for=(VICTIM.sid,))
        mesh.judged(waits)
        assert mesh.waiting_for(VICTIM) == ["j-s1-r0 waits for it, says a-n"]
        mesh.judged(cluster_report("j-s1-r0", condition="well"))
        assert mesh.waiting_for(VICTIM) == []
        mesh.judged(waits)
        mesh.forget_job("j")
        assert mesh.waiting_for(VICTIM) == []


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
