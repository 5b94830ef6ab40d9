"""Route tables and Type 4 (draft §4.3, §5.4)."""

from __future__ import annotations

import pytest

from entities.policy_book import PolicyBook
from entities.router_core import TableDecision, compute_entries, decide_table, mean_transfer_ms
from schemas.registry import Capability, InstanceState, ServiceRecord
from schemas.signals import StagePolicy
from tests.entity_records import instance, policy, sample

S = InstanceState


def table(stage: StagePolicy, *records: ServiceRecord) -> TableDecision:
    return decide_table(policy(), stage, records)


class TestDecideTable:
    def test_active_instances_of_all_clusters_take_part_with_weight_one(self) -> None:
        decision = table(
            StagePolicy(stage=0, window=3), instance("j-s0-r1", cluster="west"), instance("j-s0-r0")
        )
        assert [(e.sid, e.cluster, e.weight, e.window) for e in decision.entries] == [
            ("j-s0-r0", "east", 1.0, 3),
            ("j-s0-r1", "west", 1.0, 3),
        ]
        assert decision.reason == "policy 1: 2 of 2 take work"

    def test_other_stages_and_jobs_do_not(self) -> None:
        decision = table(StagePolicy(stage=0, window=3), instance("j-s1-r0"), instance("k-s0-r0"))
        assert decision.entries == ()

    def test_weights_come_from_the_policy_and_zero_is_a_standby(self) -> None:
        stage = StagePolicy(stage=0, window=3, weights={"j-s0-r0": 0.25, "j-s0-r1": 0.0})
        decision = table(stage, instance("j-s0-r0"), instance("j-s0-r1"))
        assert [e.weight for e in decision.entries] == [0.25, 0.0]
        assert "standby" in decision.entries[1].reason

    @pytest.mark.parametrize("state", [S.PENDING, S.FAULTED, S.GONE])
    def test_who_cannot_work_is_out_with_the_reason(self, state: S) -> None:
        decision = table(
            StagePolicy(stage=0, window=3), instance("j-s0-r0"), instance("j-s0-r1", state=state)
        )
        assert [e.sid for e in decision.entries] == ["j-s0-r0"]
        assert f"out: j-s0-r1 {state}" in decision.reason

    def test_a_draining_one_keeps_its_place_without_new_work(self) -> None:
        decision = table(StagePolicy(stage=0, window=3), instance("j-s0-r0", state=S.DRAINING))
        assert [(e.weight, e.reason) for e in decision.entries] == [
            (0.0, "draining: finishes what is bound to it")
        ]

    def test_a_negative_weight_counts_as_zero(self) -> None:
        decision = table(StagePolicy(stage=0, window=3, weights={"j-s0-r0": -1.0}), instance("j-s0-r0"))
        assert decision.entries[0].weight == 0.0

    def test_the_order_of_records_does_not_matter(self) -> None:
        records = [instance(f"j-s0-r{number}") for number in range(5)]
        stage = StagePolicy(stage=0, window=3)
        assert table(stage, *records) == table(stage, *reversed(records))

    def test_only_what_is_chosen_makes_a_new_table(self) -> None:
        records = [instance("j-s0-r0")]
        stage = StagePolicy(stage=0, window=3)
        one = decide_table(policy(revision=1), stage, records)
        two = decide_table(policy(revision=2), stage, records)
        assert one.reason != two.reason
        assert one.choice == two.choice
        reborn = decide_table(policy(), stage, [instance("j-s0-r0", incarnation="i2")])
        assert reborn.choice != one.choice


class TestCompute:
    def test_load_heterogeneity_and_latency(self) -> None:
        record = instance("j-s0-r0", capability=Capability(device="cuda:0"))
        (entry,) = compute_entries([record], {"j-s0-r0": sample(queue=3)}, {})
        assert (entry.queue, entry.service_ms, entry.latency_ms, entry.device) == (3, 5.0, 2.0, "cuda:0")

    def test_a_sample_of_an_earlier_incarnation_says_nothing(self) -> None:
        (entry,) = compute_entries([instance("j-s0-r0", incarnation="i2")], {"j-s0-r0": sample()}, {})
        assert (entry.service_ms, entry.latency_ms) == (0.0, 0.0)

    def test_weights_follow_policy_and_state(self) -> None:
        stages = (StagePolicy(stage=0, window=1, weights={"j-s0-r0": 0.5}),)
        policies = {"j": policy(stages=stages)}
        records = [instance("j-s0-r0"), instance("j-s0-r1"), instance("j-s0-r2", state=S.FAULTED)]
        assert [entry.weight for entry in compute_entries(records, {}, policies)] == [0.5, 1.0, 0.0]

    def test_latency_without_transfers_is_zero(self) -> None:
        assert mean_transfer_ms(sample(links=())) == 0.0


class TestPolicyBook:
    def test_a_higher_revision_wins_and_an_older_one_is_told_so(self) -> None:
        book = PolicyBook()
        assert book.take(policy(revision=2)) == "adopted"
        assert book.take(policy(revision=2)) == "held"
        assert book.take(policy(revision=1)) == "older"
        assert book.take(policy(revision=3)) == "adopted"
        assert book.active["j"].revision == 3

    def test_an_ended_job_does_not_come_back_by_a_late_policy(self) -> None:
        book = PolicyBook()
        book.take(policy(revision=1))
        assert book.take(policy(revision=2, ended=True)) == "ended"
        assert book.take(policy(revision=2, ended=True)) == "ended", "the report may have been lost"
        assert book.take(policy(revision=1)) == "older"
        assert book.active == {}
        assert book.take(policy(revision=3)) == "adopted", "the orchestrator started the job again"

    def test_what_ended_is_remembered_within_bounds(self) -> None:
        book = PolicyBook(remembered_ended=2)
        for number in range(5):
            book.take(policy(f"j{number}", ended=True))
        assert book.take(policy("j4")) == "older"
        assert book.take(policy("j0", revision=1)) == "adopted"
