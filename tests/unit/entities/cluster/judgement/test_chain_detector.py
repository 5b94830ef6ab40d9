"""Draft §5.5: when the agent of a node calls an instance stalled or underperforming. Times are given."""

from __future__ import annotations

from typing import Any

import pytest

from entities.cluster.config import ChainConfig
from entities.cluster.core import ProcessWork
from entities.cluster.judgement.chain_detector import (
    ChainDetector,
    InstanceCondition,
    InstanceProbe,
)
from tests.builders.telemetry import sample

SID, OTHER = "j-s0-r0", "j-s1-r0"


class Node:
    """A node whose instances say each second what a test has them say."""

    def __init__(self, config: ChainConfig | None = None, expected_ms: float = 50.0) -> None:
        self.expected_ms = expected_ms
        self.detector = ChainDetector(config or ChainConfig(stalled_least_s=10.0, silent_s=10.0))
        self.now = 0.0
        self.cpu_s = 0.0
        self.said: list[tuple[str, InstanceCondition]] = []

    def second(self, *samples: Any, computes: bool = False, state: Any = "running", ended: str = "") -> None:
        """One second passes; these samples come, and all processes are looked at."""
        self.now += 1.0
        self.cpu_s += 0.9 if computes else 0.0
        for each in samples:
            self.detector.observe(each, self.expected_ms, self.now)
        probe = InstanceProbe(state=state, work=ProcessWork(cpu_s=self.cpu_s))
        probes = {sid: probe for sid in (SID, OTHER) if sid != ended}
        self.said += self.detector.review(self.now, probes).items()

    @property
    def last(self) -> InstanceCondition:
        return self.said[-1][1]


def busy(computed: int, sid: str = SID, **more: Any) -> Any:
    """It has work, and has finished so many tasks."""
    return sample(sid, **{"computed": computed, "queue": 2, "computing_ms": 5.0, "in_flight": 3} | more)


def served(count: int, service_ms: float, sid: str = SID) -> Any:
    return busy(count, sid, microbatches=count, service_ms=service_ms)


class TestStalled:
    def test_work_that_does_not_get_on_is_reported_once(self) -> None:
        node = Node()
        for count in range(5):
            node.second(busy(count))
        assert node.said == []
        for _ in range(30):
            node.second(busy(4))
        assert [(sid, said.condition, said.scope, said.kind) for sid, said in node.said] == [
            (SID, "stalled", "instance", "structural")
        ]
        assert "has finished nothing for 11 s" in node.last.evidence
        assert "1 microbatch at hand and 2 queued, and does not compute" in node.last.evidence

    def test_what_computes_is_transient_until_it_has_taken_many_times_as_long(self) -> None:
        node = Node(ChainConfig(stalled_least_s=5.0, hung_times=3.0))
        node.second(busy(1), computes=True)
        for _ in range(10):
            node.second(busy(1), computes=True)
        assert (node.last.condition, node.last.kind) == ("stalled", "transient")
        for _ in range(10):
            node.second(busy(1), computes=True)
        assert [said.kind for _, said in node.said] == ["transient", "structural"]

    def test_a_slow_instance_is_given_longer(self) -> None:
        node = Node()
        node.second(busy(1, service_ms=2_000.0))
        for _ in range(39):
            node.second(busy(1, service_ms=2_000.0))
        assert node.said == [], "20 microbatches of 2 s take 40 s"
        node.second(busy(1, service_ms=2_000.0), computes=True)
        node.second(busy(1, service_ms=2_000.0), computes=True)
        assert node.last.condition == "stalled"

    def test_its_first_microbatch_may_compile(self) -> None:
        node = Node()
        for _ in range(100):
            node.second(busy(0, microbatches=0, service_ms=0.0))
        assert node.said == []

    def test_an_order_of_the_orchestrator_has_its_own_deadline(self) -> None:
        node = Node()
        for _ in range(100):
            node.second(busy(1, obeys=True))
        assert node.said == []

    def test_without_work_nothing_stalls(self) -> None:
        node = Node()
        for _ in range(100):
            node.second(sample(SID, computed=3, in_flight=0))
        assert node.said == []

    def test_it_is_well_again_when_it_gets_on(self) -> None:
        node = Node()
        for _ in range(20):
            node.second(busy(1))
        node.second(busy(2))
        assert [said.condition for _, said in node.said] == ["stalled", "well"]
        assert node.last.evidence == f"{SID} is well again"

    def test_a_stopped_process_is_stalled_at_once(self) -> None:
        node = Node()
        node.second(busy(1))
        node.second(state="stopped")
        assert (node.last.condition, node.last.scope, node.last.kind) == ("stalled", "instance", "transient")

    def test_silence_counts_if_there_was_work(self) -> None:
        node = Node()
        node.second(busy(1))
        node.second(busy(2))
        for _ in range(12):
            node.second()
        assert "says nothing for" in node.last.evidence
        idle = Node()
        idle.second(sample(SID))
        for _ in range(60):
            idle.second()
        assert idle.said == []

    def test_its_end_clears_it_and_another_incarnation_begins_anew(self) -> None:
        node = Node()
        for _ in range(20):
            node.second(busy(1))
        node.second(ended=SID)
        assert node.last == InstanceCondition(evidence=f"{SID} has ended")
        node.second(busy(1, incarnation="i2"))
        assert node.detector.of(SID, "i1") is None
        assert node.detector.of(SID, "i2") is not None


class TestChains:
    def test_who_waits_is_told_apart_from_who_is_waited_for(self) -> None:
        node = Node()
        waits = sample(SID, computed=1, in_flight=2, waits_for=(OTHER,))
        for _ in range(15):
            node.second(waits, busy(1, OTHER))
        said = dict(node.said)
        assert (said[SID].condition, said[SID].scope) == ("stalled", "none")
        assert f"waits for {OTHER}" in said[SID].evidence
        assert (said[OTHER].condition, said[OTHER].scope) == ("stalled", "instance")
        assert node.detector.waiting(OTHER) == (SID,)
        assert node.detector.waits_for(SID) == (OTHER,)

    def test_a_pipeline_that_moves_waits_for_nobody(self) -> None:
        node = Node()
        for count in range(60):
            node.second(sample(SID, computed=1, in_flight=1 + count % 2, waits_for=(OTHER,)))
        assert node.said == []


class TestUnderperforming:
    def test_several_samples_in_a_row_and_as_many_for_its_end(self) -> None:
        node = Node()
        node.second(served(0, 160.0))
        for count in range(1, 5):
            node.second(served(count, 160.0))
        assert node.said == []
        node.second(served(5, 160.0))
        assert (node.last.condition, node.last.scope) == ("underperforming", "instance")
        assert "160.0 ms per microbatch, 3.2× what the plan expects" in node.last.evidence
        assert not node.detector.does_well(SID)
        for count in range(6, 10):
            node.second(served(count, 60.0))
        assert node.last.condition == "underperforming"
        node.second(served(10, 60.0))
        assert node.last.condition == "well"
        assert node.detector.does_well(SID)

    def test_between_the_limits_nothing_changes(self) -> None:
        for at in (110.0, 145.0):
            node = Node()
            for count in range(20):
                node.second(served(count, at))
            assert node.said == []
            for count in range(20, 30):
                node.second(served(count, 200.0))
            for count in range(30, 60):
                node.second(served(count, at))
            assert [said.condition for _, said in node.said] == ["underperforming"]

    def test_samples_without_new_work_do_not_count(self) -> None:
        node = Node()
        for _ in range(9):
            node.second(served(4, 500.0), computes=True)
        assert node.said == []

    def test_a_few_milliseconds_more_make_nobody_slow(self) -> None:
        node = Node(ChainConfig(least_excess_ms=900.0))
        for count in range(30):
            node.second(served(count, 900.0))
        assert node.said == []

    def test_without_a_plan_nothing_is_judged(self) -> None:
        node = Node(expected_ms=0.0)
        for count in range(30):
            node.second(served(count, 900.0))
        assert node.said == []
        assert not node.detector.does_well(SID)

    def test_where_all_are_slow_the_node_is(self) -> None:
        node = Node()
        for count in range(10):
            node.second(served(count, 300.0), served(count, 300.0, OTHER))
        assert {(said.condition, said.scope) for _, said in node.said} == {("underperforming", "node")}
        assert "so do all instances of the node" in node.last.evidence


def test_limits_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="well 3 must be between 1 and slow 3"):
        ChainConfig(slow=3, well=3)


class TestLinks:
    def test_a_link_that_failed_is_broken_until_something_goes_over_another_one(self) -> None:
        node = Node(ChainConfig(broken_link_s=10.0))
        far, near = {"peer": "far", "errors": 2}, {"peer": "near", "errors": 1}
        node.second(busy(1, links=[far, near]))
        assert node.detector.broken_links(SID, node.now) == ("far", "near")
        node.second(busy(2, links=[{"peer": "far"}, {"peer": "near", "received_bytes": 8}]))
        assert node.detector.broken_links(SID, node.now) == ("far",)
        assert node.detector.broken_links(OTHER, node.now) == ()
        assert node.detector.broken_links(SID, node.now + 10.0) == (), "long ago"
        node.second(busy(1, incarnation="i2"))
        assert node.detector.broken_links(SID, node.now) == (), "another incarnation has other links"
