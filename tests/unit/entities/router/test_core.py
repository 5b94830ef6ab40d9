"""Route tables and Type 4 (draft §4.3, §5.4)."""

from __future__ import annotations

import math
import random

import pytest

from entities.qos.policy_book import PolicyBook
from entities.router.compute_notification import compute_entries, is_news, stage_loads
from entities.router.core import TableDecision, decide_table, member_of, route_entry, worth_writing
from entities.router.load_statistics import LoadStatistics, mean_transfer_ms
from entities.router.memo import Memo
from entities.router.outlier_ejection import InstanceHealth
from schemas.data_plane import RouteEntry
from schemas.registry import Capability, InstanceState, ServiceRecord
from schemas.signals import ComputeEntry, StagePolicy
from schemas.telemetry import InstanceSample, LinkSample
from tests.builders.records import instance
from tests.builders.routes import policy
from tests.builders.telemetry import linked_sample as sample

S = InstanceState


def table(stage: StagePolicy, *records: ServiceRecord, memo: Memo[RouteEntry] | None = None) -> TableDecision:
    return decide_table(policy(), stage, records, memo=memo)


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

    def test_a_topology_says_how_far_an_instance_is(self) -> None:
        records = (instance("j-s0-r0"), instance("j-s0-r1", cluster="west"))
        decision = decide_table(policy(), StagePolicy(stage=0, window=3), records, near={"west": 3})
        assert [entry.hops for entry in decision.entries] == [0, 3]
        assert decision.entries[1].reason.endswith("3 links away by the topology")

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

    def test_until_it_is_measured_an_instance_takes_what_the_plan_and_its_slot_say(self) -> None:
        fast, slow = (
            instance(sid).model_copy(update={"capability": Capability(speed={"stage": speed})})
            for sid, speed in (("j-s0-r0", 4.0), ("j-s0-r1", 1.0))
        )
        stage, measured = StagePolicy(stage=0, window=6, reference_ms=100.0), LoadStatistics()
        entries = decide_table(policy(), stage, [fast, slow], measured).entries
        assert [(e.service_ms, e.window) for e in entries] == [(25.0, 6), (100.0, 2)]
        assert "25.0 ms per microbatch expected" in entries[0].reason
        measured.add(sample("j-s0-r0", service_ms=50.0))
        entries = decide_table(policy(), stage, [fast, slow], measured).entries
        assert [e.service_ms for e in entries] == [50.0, 200.0], "all take twice what was planned"
        measured.add(sample("j-s0-r1", service_ms=90.0))
        entries = decide_table(policy(), stage, [fast, slow], measured).entries
        assert [e.service_ms for e in entries] == [50.0, 90.0]
        assert "expected" not in entries[0].reason

    def test_slots_that_are_nearly_as_fast_have_equal_windows(self) -> None:
        records = [
            instance(f"j-s0-r{number}").model_copy(update={"capability": Capability(speed={"stage": speed})})
            for number, speed in enumerate((1.0, 1.1, 1.2))
        ]
        assert [e.window for e in table(StagePolicy(stage=0, window=4), *records).entries] == [4, 4, 4]

    def test_only_what_is_chosen_makes_a_new_table(self) -> None:
        records = [instance("j-s0-r0")]
        stage = StagePolicy(stage=0, window=3)
        one = decide_table(policy(revision=1), stage, records)
        two = decide_table(policy(revision=2), stage, records)
        assert one.reason != two.reason
        assert worth_writing(one, two) == "no"
        reborn = decide_table(policy(), stage, [instance("j-s0-r0", incarnation="i2")])
        assert worth_writing(one, reborn) == "now"


def test_of_a_stage_only_those_are_told_anew_that_have_changed() -> None:
    """Of a thousand instances one drains, and the others' entries are the same objects as before."""
    records = [instance(f"j-s0-r{number}") for number in range(5)]
    stage, memo = StagePolicy(stage=0, window=3), Memo(route_entry)
    before, again = table(stage, *records, memo=memo), table(stage, *records, memo=memo)
    records[3] = instance("j-s0-r3", state=S.DRAINING)
    after = table(stage, *records, memo=memo)
    assert after == table(stage, *records)
    assert all(one is other for one, other in zip(before.entries, again.entries, strict=True))
    same = [one is other for one, other in zip(before.entries, after.entries, strict=True)]
    assert same == [True, True, True, False, True]
    assert (worth_writing(before, again), worth_writing(before, after)) == ("no", "now")
    loads = Memo(ComputeEntry)
    one, other = (compute_entries(records[:3], LoadStatistics(), {}, memo=loads) for _ in range(2))
    assert all(first is second for first, second in zip(one, other, strict=True))


def statistics(**service_ms: float) -> LoadStatistics:
    """What five samples of each say: SID with `_` for `-` → milliseconds per microbatch."""
    found = LoadStatistics()
    for sid, ms in service_ms.items():
        for number in range(5):
            found.add(sample(sid.replace("_", "-"), service_ms=ms, microbatches=number, links=()))
    return found


def measured_table(found: LoadStatistics, **health: float) -> TableDecision:
    records = [instance("j-s0-r0"), instance("j-s0-r1"), instance("j-s0-r2")]
    states = {
        member_of(record): InstanceHealth(health[record.sid.replace("-", "_")], "ejected")
        for record in records
        if record.sid.replace("-", "_") in health
    }
    return decide_table(policy(), StagePolicy(stage=0, window=2), records, found, states)


class TestMeasurements:
    def test_the_entries_say_what_was_measured_and_why_it_matters(self) -> None:
        decision = measured_table(statistics(j_s0_r0=50.0, j_s0_r1=52.0, j_s0_r2=200.0))
        assert [entry.service_ms for entry in decision.entries] == [50.0, 52.0, 200.0]
        assert "200.0 ms per microbatch, 3.8× the stage's median" in decision.entries[2].reason
        assert "median" not in decision.entries[0].reason
        assert "j-s0-r2 3.8×" in decision.reason

    def test_equal_ones_are_no_news_and_a_slow_one_is(self) -> None:
        unknown = measured_table(LoadStatistics())
        equal = measured_table(statistics(j_s0_r0=50.0, j_s0_r1=54.0, j_s0_r2=46.0))
        slow = measured_table(statistics(j_s0_r0=50.0, j_s0_r1=54.0, j_s0_r2=150.0))
        slower = measured_table(statistics(j_s0_r0=50.0, j_s0_r1=54.0, j_s0_r2=160.0))
        all_slower = measured_table(statistics(j_s0_r0=150.0, j_s0_r1=162.0, j_s0_r2=450.0))
        assert worth_writing(None, unknown) == "now"
        assert worth_writing(unknown, equal) == "no"
        assert worth_writing(equal, slow) == "measured"
        assert worth_writing(slow, slower) == "no"
        assert worth_writing(slow, all_slower) == "no", "nobody would choose otherwise"

    def test_an_ejected_one_gets_nothing_unless_nobody_else_does(self) -> None:
        decision = measured_table(LoadStatistics(), j_s0_r0=0.0, j_s0_r1=0.5)
        assert [entry.weight for entry in decision.entries] == [0.0, 0.5, 1.0]
        assert "ejected: j-s0-r0" in decision.reason
        assert worth_writing(measured_table(LoadStatistics()), decision) == "now"
        nobody = measured_table(LoadStatistics(), j_s0_r0=0.0, j_s0_r1=0.0, j_s0_r2=0.0)
        assert [entry.weight for entry in nobody.entries] == [1.0, 1.0, 1.0]

    def test_weights_that_are_no_numbers_are_no_wishes(self) -> None:
        stage = StagePolicy(stage=0, window=1, weights={"j-s0-r0": math.nan, "j-s0-r1": math.inf})
        assert [entry.weight for entry in table(stage, instance("j-s0-r0"), instance("j-s0-r1")).entries] == [
            1,
            1,
        ]

    @pytest.mark.parametrize("spread", [0.0, 0.1, 0.2])
    def test_noise_changes_no_tables(self, spread: float) -> None:
        """A minute of samples, one a second: equal instances, one of them 4× slower, noise on each."""
        changes = []
        for seed in range(20):
            rng = random.Random(seed)
            found, written, count = LoadStatistics(), measured_table(LoadStatistics()), 0
            for second in range(60):
                for replica, ms in enumerate((50.0, 50.0, 200.0)):
                    noisy = ms * rng.lognormvariate(0, spread)
                    if rng.random() < 0.02:
                        noisy = rng.choice((math.nan, -1.0, 1e15, 20 * ms))
                    found.add(sample(f"j-s0-r{replica}", service_ms=noisy, microbatches=second, links=()))
                fresh = measured_table(found)
                if worth_writing(written, fresh) != "no":
                    written, count = fresh, count + 1
            changes.append(count)
        print(f"spread {spread}: table changes per minute by seed {changes}")
        assert max(changes) <= (3 if spread < 0.2 else 12)


class TestStatistics:
    @pytest.mark.parametrize("absurd", [math.nan, math.inf, -1.0, 1e12])
    def test_what_is_no_measurement_is_refused(self, absurd: float) -> None:
        found = statistics(j_s0_r0=50.0)
        assert not found.add(sample(service_ms=absurd))
        assert not found.add(sample(queue=-3))
        links = (LinkSample(peer="j-s1-r0", transfers=1, transfer_ms=absurd),)
        assert not found.add(sample(links=links))
        figures = found.of("j-s0-r0", "i1")
        assert figures is not None
        assert (figures.service_ms, found.refused) == (50.0, 3)

    def test_two_outliers_of_five_move_nothing_and_idle_samples_count_once(self) -> None:
        found = statistics(j_s0_r0=50.0)
        for number in (7, 8, 8, 8, 8):
            found.add(sample(service_ms=900.0, microbatches=number))
        figures = found.of("j-s0-r0", "i1")
        assert figures is not None
        assert figures.service_ms == 50.0

    def test_another_incarnation_begins_anew(self) -> None:
        found = statistics(j_s0_r0=50.0)
        found.add(sample(incarnation="i2", service_ms=70.0))
        assert found.of("j-s0-r0", "i1") is None
        figures = found.of("j-s0-r0", "i2")
        assert figures is not None
        assert figures.service_ms == 70.0

    def test_latency_without_transfers_is_zero(self) -> None:
        assert mean_transfer_ms(sample(links=())) == 0.0


class TestCompute:
    def told(self, *samples: InstanceSample) -> tuple[ComputeEntry, ...]:
        found = LoadStatistics()
        for each in samples:
            found.add(each)
        return compute_entries([instance("j-s0-r0"), instance("j-s0-r1")], found, {})

    def test_load_heterogeneity_and_latency(self) -> None:
        record = instance("j-s0-r0", capability=Capability(device="cuda:0"))
        found = LoadStatistics()
        found.add(sample(queue=3))
        (entry,) = compute_entries([record], found, {})
        assert (entry.queue, entry.service_ms, entry.latency_ms, entry.device) == (3, 5.0, 2.0, "cuda:0")

    def test_a_sample_of_an_earlier_incarnation_says_nothing(self) -> None:
        found = LoadStatistics()
        found.add(sample())
        (entry,) = compute_entries([instance("j-s0-r0", incarnation="i2")], found, {})
        assert (entry.service_ms, entry.latency_ms) == (0.0, 0.0)

    def test_weights_follow_policy_state_and_health(self) -> None:
        stages = (StagePolicy(stage=0, window=1, weights={"j-s0-r0": 0.5}),)
        policies = {"j": policy(stages=stages)}
        records = [instance("j-s0-r0"), instance("j-s0-r1"), instance("j-s0-r2", state=S.FAULTED)]
        health = {member_of(records[1]): 0.25}
        found = compute_entries(records, LoadStatistics(), policies, health)
        assert [entry.weight for entry in found] == [0.5, 0.25, 0.0]

    def test_a_stage_in_figures(self) -> None:
        entries = self.told(sample(queue=1, service_ms=10.0), sample("j-s0-r1", queue=2, service_ms=40.0))
        (stage,) = stage_loads(entries, {"j": policy()})
        assert (stage.job, stage.stage, stage.instances, stage.queue) == ("j", 0, 2, 3)
        assert (stage.rate_per_s, stage.slowest, stage.latency_p95_ms) == (125.0, 4.0, 2.0)
        assert stage.algorithm == "expected-completion"

    def test_only_what_could_change_a_choice_is_news(self) -> None:
        """Draft §4.3 Type 4, rate-limited by change."""
        before = self.told(sample(queue=2), sample("j-s0-r1", queue=2))
        assert is_news(None, before)
        assert not is_news(before, self.told(sample(queue=3), sample("j-s0-r1", queue=1)))
        assert not is_news(before, self.told(sample(queue=2, service_ms=5.4), sample("j-s0-r1", queue=2)))
        assert is_news(before, self.told(sample(queue=5), sample("j-s0-r1", queue=2)))
        assert is_news(before, self.told(sample(queue=2, service_ms=9.0), sample("j-s0-r1", queue=2)))
        assert is_news(
            before, self.told(sample(queue=2, service_ms=9.0), sample("j-s0-r1", queue=2, service_ms=9.0))
        )
        slow_link = (LinkSample(peer="j-s1-r0", transfers=1, transfer_ms=30.0),)
        assert is_news(before, self.told(sample(queue=2, links=slow_link), sample("j-s0-r1", queue=2)))
        gone = compute_entries(
            [instance("j-s0-r0"), instance("j-s0-r1", state=S.FAULTED)], LoadStatistics(), {}
        )
        assert is_news(before, gone)


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


def test_senders_share_the_rate_and_a_change_of_it_is_written_at_once() -> None:
    limited = StagePolicy(stage=0, window=3, admitted_per_s=12.0)
    before, after, more = (
        decide_table(policy(), stage, [instance("j-s0-r0")], sender_count=count)
        for stage, count in ((StagePolicy(stage=0, window=3), 2), (limited, 2), (limited, 3))
    )
    assert [table.admitted_per_s for table in (before, after, more)] == [0.0, 6.0, 4.0]
    assert "each of 3 senders admits 4 microbatches a second" in more.reason
    assert [worth_writing(before, after), worth_writing(after, more)] == ["now", "now"]
