"""Which data instance makes which microbatch (draft §4.3 Type 4, §4.4(2))."""

from __future__ import annotations

import random

import pytest

from entities.gateway.dispatch.rules import (
    choose_entries,
    entry_query,
    fill,
    interleave,
    largest_remainder,
)
from entities.presence.registry_view import RegistryView
from schemas.registry import InstanceState, Resolved, ServiceRecord, TensorSchema
from schemas.signals import ComputeEntry
from tests.builders.records import instance
from tests.builders.telemetry import compute

EAST, WEST = instance("j-data-r0"), instance("j-data-r1", cluster="west")
MICROBATCHES = tuple(range(8))


def counts(shares: dict[str, tuple[int, ...]]) -> dict[str, int]:
    return {sid: len(numbers) for sid, numbers in shares.items()}


def test_evenly_while_nothing_is_known() -> None:
    choice = choose_entries([EAST, WEST], {}, "j", MICROBATCHES)
    assert counts(choice.shares) == {"j-data-r0": 4, "j-data-r1": 4}
    assert choice.reason.startswith("evenly")


def test_in_proportion_to_what_stage_0_can_take_in_the_cluster() -> None:
    load = {"east": [compute(service_ms=5.0)], "west": [compute("j-s0-r1", service_ms=15.0)]}
    choice = choose_entries([EAST, WEST], load, "j", MICROBATCHES)
    assert counts(choice.shares) == {"j-data-r0": 6, "j-data-r1": 2}
    assert choice.reason == "by type 4: east 6.0, west 2.0"


def test_a_queue_and_a_weight_count() -> None:
    load = {"east": [compute(queue=3)], "west": [compute("j-s0-r1", weight=0.25)]}
    assert counts(choose_entries([EAST, WEST], load, "j", MICROBATCHES).shares) == {
        "j-data-r0": 6,
        "j-data-r1": 2,
    }


def test_entries_that_compute_share_by_their_own_speed() -> None:
    """Draft §7.2(1): the gateway hands data to preprocessing instances; their own figures tell how much."""
    one, other = instance("j-data-r0"), instance("j-data-r1", cluster="west")
    own = [compute("j-data-r0", stage=-1, incarnation=one.incarnation, service_ms=10.0)]
    theirs = [compute("j-data-r1", stage=-1, incarnation=other.incarnation, service_ms=30.0)]
    stage_0 = [compute("j-s0-r0", service_ms=100.0)]
    choice = choose_entries([one, other], {"east": own + stage_0, "west": theirs}, "j", MICROBATCHES)
    assert counts(choice.shares) == {"j-data-r0": 6, "j-data-r1": 2}
    assert choice.reason == "by their own speed: j-data-r0 2.0×, j-data-r1 0.7×"
    alike = [theirs[0].model_copy(update={"service_ms": 12.0, "queue": 5})]
    choice = choose_entries([one, other], {"east": own, "west": alike}, "j", MICROBATCHES)
    assert counts(choice.shares) == {"j-data-r0": 4, "j-data-r1": 4}, "noise moves nothing"
    unmeasured = choose_entries([one, other], {"east": own}, "j", MICROBATCHES)
    assert counts(unmeasured.shares) == {"j-data-r0": 4, "j-data-r1": 4}


def test_the_choice_follows_type_4_from_cluster_to_cluster() -> None:
    """Draft §4.3: "MGs select the optimal cluster and entry" by what the routers tell."""
    west = [compute("j-s0-r1", service_ms=20.0)]
    shares = [
        counts(choose_entries([EAST, WEST], {"east": [east], "west": west}, "j", MICROBATCHES).shares)
        for east in (
            compute(service_ms=5.0),
            compute(service_ms=5.0, queue=20),
            compute(service_ms=5.0, latency_ms=55.0),
            compute(service_ms=5.0, queue=100),
        )
    ]
    assert shares == [
        {"j-data-r0": 6, "j-data-r1": 2},
        {"j-data-r0": 2, "j-data-r1": 6},
        {"j-data-r0": 2, "j-data-r1": 6},
        {"j-data-r1": 8},
    ]


def test_filling_leaves_all_done_at_the_same_time() -> None:
    rng = random.Random(3)
    for _ in range(200):
        queues = [(rng.randrange(9), rng.uniform(1, 50)) for _ in range(rng.randint(1, 6))]
        total = rng.randint(1, 60)
        shares = fill(queues, total)
        assert sum(shares) == pytest.approx(total)
        ends = [(queue + share) * ms for (queue, ms), share in zip(queues, shares, strict=True) if share > 0]
        assert max(ends) == pytest.approx(min(ends))
        idle = [queue * ms for (queue, ms), share in zip(queues, shares, strict=True) if share == 0]
        assert all(end >= max(ends) * 0.999 for end in idle)


def test_a_cluster_without_stage_0_gets_nothing_while_another_has_it() -> None:
    choice = choose_entries([EAST, WEST], {"east": [compute()]}, "j", MICROBATCHES)
    assert counts(choice.shares) == {"j-data-r0": 8}


def test_an_unmeasured_instance_counts_as_the_median() -> None:
    load = {"east": [compute(service_ms=8.0)], "west": [compute("j-s0-r1", service_ms=0.0)]}
    assert counts(choose_entries([EAST, WEST], load, "j", MICROBATCHES).shares) == {
        "j-data-r0": 4,
        "j-data-r1": 4,
    }


@pytest.mark.parametrize(
    "entry",
    [compute(job="k"), compute(stage=1), compute(state=InstanceState.FAULTED), compute(weight=0.0)],
)
def test_what_takes_no_work_of_this_job_counts_nothing(entry: ComputeEntry) -> None:
    load = {"east": [entry], "west": [compute("j-s0-r1")]}
    assert counts(choose_entries([EAST, WEST], load, "j", MICROBATCHES).shares) == {"j-data-r1": 8}


def test_data_instances_beside_each_other_share_their_cluster() -> None:
    beside = instance("j-data-r2")
    load = {"east": [compute()], "west": [compute("j-s0-r1")]}
    choice = choose_entries([EAST, WEST, beside], load, "j", MICROBATCHES)
    assert counts(choice.shares) == {"j-data-r0": 2, "j-data-r1": 4, "j-data-r2": 2}


def test_only_active_ones_of_the_job() -> None:
    records = [instance("j-data-r0", state=InstanceState.FAULTED), instance("k-data-r0")]
    choice = choose_entries(records, {}, "j", MICROBATCHES)
    assert (choice.shares, choice.reason) == ({}, "no active data instance")


def test_each_microbatch_exactly_once_and_the_same_every_time() -> None:
    rng = random.Random(7)
    for _ in range(200):
        records = [
            instance(f"j-data-r{number}", cluster=rng.choice(("east", "west")))
            for number in range(rng.randint(1, 5))
        ]
        load = {
            name: [compute(service_ms=rng.random() * 9, queue=rng.randrange(4))] for name in ("east", "west")
        }
        numbers = rng.sample(range(100), rng.randint(1, 40))
        choice = choose_entries(records, load, "j", numbers)
        assert sorted(number for share in choice.shares.values() for number in share) == sorted(numbers)
        rng.shuffle(records)
        rng.shuffle(numbers)
        assert choose_entries(records, load, "j", numbers) == choice


def test_largest_remainder_is_exact_and_breaks_ties_by_order() -> None:
    assert largest_remainder(8, [1, 1, 1]) == (3, 3, 2)
    assert largest_remainder(7, [0.5, 0.0, 0.25]) == (5, 0, 2)
    assert largest_remainder(0, [1.0]) == (0,)


def test_interleaving_lets_all_begin_at_once() -> None:
    assert interleave((4, 2)) == (0, 1, 0, 0, 1, 0)
    assert sorted(interleave((3, 0, 1))) == [0, 0, 0, 2]


def chosen(*records: ServiceRecord, batch: tuple[TensorSchema, ...] = ()) -> set[str]:
    view = RegistryView()
    view.snapshot(Resolved(revision=1, records=records))
    return set(choose_entries(view.resolve(entry_query("j", batch)), {}, "j", range(4)).shares)


def test_a_unit_that_makes_other_batches_than_the_plan_takes_gets_none() -> None:
    """Draft §1: what the policy says of batches is asked of the registry by schema."""
    batch = (TensorSchema(name="tokens", shape=(4, 17), dtype="int64"),)
    longer = (TensorSchema(name="tokens", shape=(4, 33), dtype="int64"),)
    right, former = (
        instance(sid).model_copy(update={"output_schema": schema})
        for sid, schema in (("j-data-r0", batch), ("j-data-r1", longer))
    )
    assert chosen(right, former) == {"j-data-r0", "j-data-r1"}
    assert chosen(right, former, batch=batch) == {"j-data-r0"}
    assert chosen(right, former, batch=longer) == {"j-data-r1"}
    assert chosen(right.model_copy(update={"output_schema": ()}), former, batch=batch) == set()


def test_a_tag_that_is_taken_away_changes_who_gets_microbatches() -> None:
    """Draft §1: gateways dispatch to what the registry finds by content."""
    near, far = instance("j-data-r0"), instance("j-data-r1", cluster="west")
    assert chosen(near, far, instance("j-s0-r0"), instance("k-data-r0")) == {"j-data-r0", "j-data-r1"}
    assert chosen(near, far.model_copy(update={"tags": ()})) == {"j-data-r0"}
    assert chosen(near.model_copy(update={"prefix": "train/k/data"}), far) == {"j-data-r1"}
    assert chosen(near, far.model_copy(update={"state": InstanceState.DRAINING})) == {"j-data-r0"}
