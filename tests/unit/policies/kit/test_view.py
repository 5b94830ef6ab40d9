"""What policies see: incarnations, registry states, own suggestions and their decisions."""

from __future__ import annotations

import numpy as np

from policies.kit.policy import Policy
from policies.kit.view import JobView, Observations
from schemas.envelope import EntityKind
from schemas.job import JobState
from schemas.registry import Capability, Endpoint, InstanceState
from tests.builders.jobs import state_event
from tests.builders.policies import decision
from tests.builders.records import advertisement, instance, service
from tests.builders.steps import claim
from tests.builders.telemetry import sample


def seen(*messages) -> Observations:
    observations = Observations()
    for at, message in enumerate(messages):
        observations.take(message, float(at))
    return observations


def test_samples_make_the_view_and_its_windows():
    view = seen(
        sample(service_ms=0.0), sample(service_ms=8.0, step=2), sample("j-s1-r0", service_ms=9.0)
    ).jobs["j"]
    assert view.stages == [0, 1]
    assert view.step == 2
    assert view.instances["j-s0-r0"].samples == 1  # 0 ms means not measured yet
    np.testing.assert_array_equal(view.series("service_ms", ["j-s0-r0", "j-s1-r0"])[:, -1], [8.0, 9.0])


def test_only_usable_fresh_and_measured_instances_are_of_a_stage():
    observations = seen(sample(), sample("j-s0-r1"), sample("j-s0-r1"), sample("j-s0-r2"))
    observations.take(
        advertisement(instance("j-s0-r0", state=InstanceState.FAULTED), instance("j-s0-r1")), 3.0
    )
    view = observations.jobs["j"]
    assert [instance.sid for instance in view.stage(0)] == ["j-s0-r1", "j-s0-r2"]
    assert [instance.sid for instance in view.stage(0, samples=2)] == ["j-s0-r1"]
    assert [instance.sid for instance in view.stage(0, now=100.0)] == []


def test_another_incarnation_starts_afresh_and_the_old_one_is_fenced():
    observations = seen(sample(service_ms=5.0), sample(service_ms=50.0, incarnation="i2"))
    assert observations.take(sample(service_ms=5.0), 2.0) is None
    view = observations.jobs["j"]
    assert view.instances["j-s0-r0"].incarnation == "i2"
    assert np.nanmax(view.series("service_ms", ["j-s0-r0"])) == 50.0
    assert np.isfinite(view.series("service_ms", ["j-s0-r0"])).sum() == 1


def test_a_late_advertisement_of_a_fenced_incarnation_changes_nothing():
    observations = seen(sample(), sample(incarnation="i2"))
    observations.take(advertisement(instance("j-s0-r0", state=InstanceState.FAULTED, incarnation="i1")), 2.0)
    assert observations.jobs["j"].instances["j-s0-r0"].usable


def test_a_full_advertisement_ends_what_it_does_not_name():
    observations = seen(advertisement(instance("j-s0-r0"), instance("j-s0-r1")), sample(), sample("j-s0-r1"))
    observations.take(advertisement(instance("j-s0-r1"), full=True, revision=9), 3.0)
    assert [instance.sid for instance in observations.jobs["j"].stage(0)] == ["j-s0-r1"]
    observations.take(advertisement(removed=("j-s0-r1",), revision=10), 4.0)
    assert observations.jobs["j"].stage(0) == []


def test_an_ended_job_is_forgotten_and_late_samples_do_not_bring_it_back():
    observations = seen(sample(), state_event(JobState.DONE))
    assert observations.take(sample(), 9.0) is None
    assert observations.jobs == {}


def test_a_module_for_some_jobs_sees_only_those():
    observations = Observations(jobs=("k",))
    observations.take(sample(), 0.0)
    observations.take(sample("k-s0-r0", job="k"), 0.0)
    assert list(observations.jobs) == ["k"]


def test_a_decision_finds_its_suggestion_whichever_comes_first():
    class Any(Policy):
        name = "any"

    for order in (("said", "decided"), ("decided", "said")):
        observations = seen(sample())
        view = observations.jobs["j"]
        said = Any().set_weights(view, 0, {"j-s0-r0": 1.0}, reason="because")
        decided = decision("e1", module="any")
        for what in order:
            if what == "said":
                observations.take(said, 1.0, id="e1")
            else:
                observations.take(decided, 1.0)
        assert view.own["stage 0"].declined, order


def test_claims_of_the_running_step_are_counted_by_owner():
    told = ((1, 0, "a"), (2, 0, "a"), (2, 1, "b"), (2, 1, "b"), (1, 5, "b"))
    observations = seen(*(claim(microbatch, sid, step=step) for step, microbatch, sid in told))
    view: JobView = observations.jobs["j"]
    assert view.claims(2) == {"a": 1, "b": 1}  # repeated ones count once, late ones not at all
    assert view.claims(1) == {}


def test_free_slots_are_those_in_which_the_registry_shows_nobody() -> None:
    def agent(node: str, slots: int, **more):
        place = Endpoint(cluster="east", node=node)
        capability = Capability(slots=slots)
        fields = {"kind": EntityKind.CLUSTER, "endpoint": place, "capability": capability} | more
        return service(f"agent-{node}", **fields)

    observations = seen(
        sample(),
        advertisement(
            *(agent("east-n1", 4), agent("full", 1), agent("away", 3, state=InstanceState.DRAINING)),
            *(instance("j-s0-r0"), instance("j-data-r0"), instance("other-s1-r0")),
            instance("j-s0-r1", state=InstanceState.GONE),
            instance("other-s0-r0", endpoint=Endpoint(cluster="east", node="full")),
        ),
    )
    view = observations.jobs["j"]
    assert view.free_slots() == {"agent-east-n1": 2}
    record = view.record("agent-full")
    assert record is not None
    assert record.capability.slots == 1
    assert view.record("nobody") is None
