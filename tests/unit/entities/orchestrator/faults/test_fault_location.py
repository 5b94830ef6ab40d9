"""What an orchestrator makes of a report, given what registry and node agent say (draft §5.5)."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from entities.orchestrator.faults.fault_location import (
    against_witness,
    in_words,
    judge_fault,
    turned_round,
)
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import Judgement
from schemas.fault import FaultReport
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


class TestTwoEndsOfALink:
    """§4.4(5): of two that do not reach each other, the one with other broken dependencies is at fault."""

    WITNESS = member("j-s1-r0")
    BETWEEN = f"{VICTIM.sid} -> {WITNESS.sid}: its links there fail"
    BACK = f"{WITNESS.sid} -> {VICTIM.sid}: its links there fail"
    ELSEWHERE = f"{WITNESS.sid} -> j-s2-r0: its links there fail"

    def found(self, own: tuple[str, ...], witness: tuple[str, ...], gone: tuple[str, ...] = ()) -> str:
        """Who is at fault of an instance that runs, and of the witness that does not reach it."""
        judged, report = judgement("running", broken=own), self.report()
        its = judgement("running", broken=witness).model_copy(update={"sid": self.WITNESS.sid})
        verdict = judge_fault(
            VICTIM, InstanceState.ACTIVE, judged, report, against_witness(judged, its, gone)
        )
        turned = turned_round(report, verdict)
        assert (turned is None) == (verdict.verdict == "structural")
        return VICTIM.sid if turned is None else turned.sid

    def report(self) -> FaultReport:
        return fault_report("unreachable", witness=self.WITNESS, sid=VICTIM.sid)

    def test_taking_its_broken_dependencies_away_changes_the_choice(self) -> None:
        with_others = (self.BACK, self.ELSEWHERE)
        assert self.found((self.BETWEEN,), with_others) == self.WITNESS.sid
        assert self.found((), with_others) == self.WITNESS.sid
        assert self.found((self.BETWEEN,), ()) == VICTIM.sid
        assert self.found((self.BETWEEN,), (self.BACK,)) == VICTIM.sid, "an end with only this one broken"
        both = f"{VICTIM.sid} -> j-s1-r1: its links there fail"
        assert self.found((self.BETWEEN, both), with_others) == VICTIM.sid, "they say nothing"

    def test_a_dependency_on_what_is_gone_counts_for_neither(self) -> None:
        assert self.found((), (self.BACK, self.ELSEWHERE), gone=("j-s2-r0",)) == VICTIM.sid

    def test_a_witness_that_stands_still_is_at_fault(self) -> None:
        """Of such an instance its agent names all dependencies of the topology."""
        assert self.found((), ("stage 0 -> j-s1-r0", "j-s1-r0 -> stage 2: 512 bytes")) == self.WITNESS.sid

    def test_a_report_is_turned_round_once(self) -> None:
        report = self.report()
        verdict = judge_fault(VICTIM, InstanceState.ACTIVE, judgement("running"), report, (self.ELSEWHERE,))
        assert (verdict.verdict, verdict.at_fault) == ("transient", self.WITNESS.sid)
        assert self.ELSEWHERE in verdict.reason
        turned = turned_round(report, verdict)
        assert turned is not None
        assert (turned.sid, turned.witness) == (self.WITNESS.sid, VICTIM)
        assert turned_round(turned, verdict) is None

    def test_one_that_has_ended_is_at_fault_whatever_else_is_broken(self) -> None:
        gone = judge_fault(VICTIM, InstanceState.ACTIVE, judgement("gone"), self.report(), (self.ELSEWHERE,))
        assert (gone.verdict, gone.at_fault) == ("structural", "")


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
