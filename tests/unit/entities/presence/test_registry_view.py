"""A holder's view follows Type 2, and knows when it missed something (draft §4.3)."""

from __future__ import annotations

import random

import pytest

from entities.presence.registry_view import RegistryView
from schemas.registry import InstanceState, Resolve, Resolved, ServiceRecord
from schemas.signals import RouteAdvertisement
from tests.builders.records import instance, service


def delta(
    previous: int, revision: int, *changed: ServiceRecord, removed: tuple[str, ...] = ()
) -> RouteAdvertisement:
    return RouteAdvertisement(previous=previous, revision=revision, changed=changed, removed=removed)


def full(revision: int, *records: ServiceRecord) -> RouteAdvertisement:
    return RouteAdvertisement(previous=revision, revision=revision, full=True, changed=records)


def test_deltas_that_follow_are_applied() -> None:
    view = RegistryView()
    view.apply(full(5, instance("j-s0-r0")))
    assert view.apply(delta(5, 7, instance("j-s1-r0"), removed=("j-s0-r0",))) == {"j-s1-r0", "j-s0-r0"}
    assert (view.revision, list(view.records)) == (7, ["j-s1-r0"])


def test_a_duplicate_changes_nothing() -> None:
    view = RegistryView()
    view.apply(full(5))
    view.apply(delta(5, 6, instance()))
    assert view.apply(delta(5, 6, instance())) == frozenset()


def test_a_gap_is_noticed_and_nothing_is_applied() -> None:
    view = RegistryView()
    view.apply(full(5))
    assert view.apply(delta(6, 7, instance())) is None
    assert (view.revision, view.records) == (5, {})


def test_an_older_delta_is_a_gap_too() -> None:
    """The registry may have been set up anew: only a snapshot can tell."""
    view = RegistryView()
    view.apply(full(50))
    assert view.apply(delta(2, 3)) is None


def test_a_full_state_replaces_and_names_only_what_differs() -> None:
    view = RegistryView()
    view.apply(full(5, instance("j-s0-r0"), instance("j-s0-r1")))
    touched = view.apply(full(9, instance("j-s0-r0"), instance("j-s1-r0")))
    assert touched == {"j-s0-r1", "j-s1-r0"}


def test_a_full_state_in_pieces_adds_and_never_removes() -> None:
    view = RegistryView()
    view.apply(full(5, instance("j-s0-r0"), instance("j-s0-r1")))
    assert view.apply(delta(5, 5, instance("j-s0-r0"))) == frozenset()
    assert view.apply(delta(5, 5, instance("j-s0-r1", version="2"))) == {"j-s0-r1"}
    assert len(view.records) == 2


def test_the_order_of_lost_and_late_messages_never_leaves_a_wrong_view() -> None:
    """A bus that drops, doubles and reorders; whenever the view says that it follows, it is right."""
    for seed in range(200):
        rng = random.Random(seed)
        truth: dict[str, ServiceRecord] = {}
        at: dict[int, dict[str, ServiceRecord]] = {0: {}}
        sent = []
        for revision in range(1, 30):
            sid = f"j-s0-r{rng.randrange(5)}"
            if sid in truth and rng.random() < 0.4:
                del truth[sid]
                sent.append(delta(revision - 1, revision, removed=(sid,)))
            else:
                truth[sid] = instance(sid, version=str(revision))
                sent.append(delta(revision - 1, revision, truth[sid]))
            at[revision] = dict(truth)
        noisy = [one for one in sent for _ in range(rng.choice((0, 1, 1, 1, 2)))]
        for index in range(len(noisy) - 1):
            if rng.random() < 0.1:
                noisy[index], noisy[index + 1] = noisy[index + 1], noisy[index]
        view = RegistryView()
        for message in noisy:
            if view.apply(message) is None:
                revision = rng.randrange(message.revision, 30)
                view.snapshot(Resolved(revision=revision, records=tuple(at[revision].values())))
            assert view.records == at[view.revision], f"seed {seed}, revision {view.revision}"


def test_instances_by_job_and_cluster_in_order_of_sid() -> None:
    view = RegistryView()
    view.apply(
        full(
            1,
            service(),
            instance("j-s0-r1", cluster="west"),
            instance("j-s0-r0"),
            instance("j-data-r0"),
            instance("k-s0-r0", state=InstanceState.PENDING),
        )
    )
    assert [record.sid for record in view.instances()] == ["j-data-r0", "j-s0-r0", "j-s0-r1", "k-s0-r0"]
    assert [record.sid for record in view.instances(job="j", cluster="west")] == ["j-s0-r1"]
    assert [record.sid for record in view.active(job="j", stage=-1)] == ["j-data-r0"]
    assert view.active(job="k", stage=0) == ()


def test_it_answers_queries_as_the_registry_would() -> None:
    view = RegistryView()
    view.apply(full(1, service(), instance("j-s0-r0"), instance("j-s1-r0"), instance("k-s0-r0")))
    found = view.resolve(Resolve(prefix="train/j", tags=("job:j",)))
    assert [record.sid for record in found] == ["j-s0-r0", "j-s1-r0"]
    assert [record.sid for record in view.resolve(Resolve(job="j", stage=1))] == ["j-s1-r0"]
    assert view.resolve(Resolve(job="j", tags=("job:k",))) == ()


@pytest.mark.parametrize("seed", range(5))
def test_instances_are_found_by_job_stage_and_cluster_whatever_happened_to_them(seed: int) -> None:
    rng = random.Random(seed)
    view = RegistryView()
    for revision in range(1, 120):
        records = [
            instance(cluster=rng.choice(["east", "west"])).model_copy(
                update={"sid": f"i{sid}", "job": rng.choice(["j", "k", None]), "stage": rng.randrange(3)}
            )
            for sid in rng.sample(range(12), rng.randrange(4))
        ]
        gone = tuple(f"i{rng.randrange(12)}" for _ in range(rng.randrange(3)))
        if rng.random() < 0.1:
            view.snapshot(
                Resolved(revision=revision, records=tuple({one.sid: one for one in records}.values()))
            )
        else:
            view.apply(delta(revision - 1, revision, *records, removed=gone))
        for job in ("j", "k", None):
            for stage in (0, 1, 2, None):
                expected = [
                    record
                    for _, record in sorted(view.records.items())
                    if record.job is not None and job in (None, record.job) and stage in (None, record.stage)
                ]
                found = view.instances(job=job, stage=stage)
                assert list(found) == expected, f"seed {seed}, revision {revision}"
                west = view.instances(job=job, stage=stage, cluster="west")
                assert west == tuple(one for one in found if one.endpoint.cluster == "west"), f"seed {seed}"
