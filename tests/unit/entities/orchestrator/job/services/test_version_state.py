"""A version's state, by its job and by what its instances register."""

from __future__ import annotations

from typing import Any

from entities.orchestrator.job.services.version_state import observed, of_different_kinds
from schemas.job import JobRecord, JobState
from schemas.registry import InstanceState, ServiceRecord
from schemas.services.model_service import ServedVersion, VersionState
from schemas.task_graph import TaskGraph, TaskUnit, UnitKind
from tests.builders.jobs import job
from tests.builders.records import instance

BEGUN = ServedVersion(version="v1", job="j", weights="bus://w", stages=2)
GRAPH = TaskGraph(
    units=tuple(
        TaskUnit(sid=f"j-s{stage}-r0", kind=UnitKind.STAGE, stage=stage, replica=0, last_layer=1)
        for stage in range(2)
    ),
    edges=(),
    constraints=(),
    placements=(),
    reason="",
    code_digest="",
    layer_count=2,
)


def served(state: JobState = JobState.RUNNING, **more: Any) -> JobRecord:
    return job("j", state, graph=GRAPH, reason="why", **more)


def serving(stage: int, replica: int = 0, **told: str) -> ServiceRecord:
    tells = {"kind": "generate", "exact": "true", "context": "64", "vocabulary": "256", "fingerprint": "f"}
    tags = tuple(f"serve.{name}={value}" for name, value in {**tells, **told}.items())
    return instance(f"j-s{stage}-r{replica}", tags=tags)


def test_a_version_is_ready_once_each_stage_has_an_instance() -> None:
    half = observed(BEGUN, served(JobState.DEPLOYING), [serving(0), serving(0, 1)])
    assert (half.state, half.replicas, half.reason) == (VersionState.DEPLOYING, (2, 0), "deploying: why")
    ready = observed(half, served(), [serving(0), serving(1, context="32")])
    assert (ready.state, ready.replicas, ready.reason) == (VersionState.READY, (1, 1), "")
    assert (ready.kind, ready.exact, ready.context, ready.vocabulary) == ("generate", True, 32, 256)
    impaired = observed(ready, served(JobState.RECOVERING), [serving(0)])
    assert (impaired.state, impaired.exact) == (VersionState.IMPAIRED, True)
    assert impaired.reason == "stage 1 has no instance; its job is recovering"
    assert observed(impaired, served(), [serving(0), serving(1)]).state is VersionState.READY
    gone = instance("j-s1-r0", state=InstanceState.GONE)
    assert observed(ready, served(), [serving(0), gone]).state is VersionState.IMPAIRED


def test_replicas_of_different_arithmetic_are_not_exact() -> None:
    alike = observed(BEGUN, served(), [serving(0), serving(0, 1), serving(1, fingerprint="g")])
    assert (alike.exact, alike.fingerprint) == (True, "f,g"), "stages may differ: each row meets one of each"
    mixed = observed(BEGUN, served(), [serving(0), serving(0, 1, fingerprint="g"), serving(1)])
    assert (mixed.exact, mixed.inexact_because) == (
        False,
        "replicas of stage 0 compute in different arithmetic: f, g",
    )
    one = observed(BEGUN, served(), [serving(0, exact="false", inexact_because="width 510"), serving(1)])
    assert (one.exact, one.inexact_because) == (False, "j-s0-r0: width 510")


def test_a_version_is_over_with_its_job() -> None:
    refused = observed(BEGUN, served(JobState.FAILED), [])
    assert (refused.state, refused.reason) == (VersionState.REFUSED, "why")
    assert observed(refused, served(), [serving(0), serving(1)]) == refused, "for good"
    assert observed(BEGUN, served(JobState.CANCELLED), []).state is VersionState.RETIRED
    ending = observed(BEGUN, served(ends_as=JobState.CANCELLED, ends_because="enough"), [serving(0)])
    assert (ending.state, ending.reason) == (VersionState.RETIRED, "enough")
    failing = observed(BEGUN, served(ends_as=JobState.FAILED, ends_because="no head"), [serving(0)])
    assert (failing.state, failing.reason) == (VersionState.REFUSED, "no head")
    assert observed(BEGUN, None, []).state is VersionState.RETIRED


def test_a_version_that_nobody_asks_is_idle_until_it_answers_again() -> None:
    ready = observed(BEGUN, served(), [serving(0), serving(1)])
    resting = observed(ready, served(dormant=True, held="nobody has asked it for 300 s"), [serving(0)])
    assert (resting.state, resting.replicas) == (VersionState.IDLE, (1, 0))
    assert resting.reason == "nobody has asked it for 300 s; the next request starts it"
    assert (
        observed(ready, served(dormant=True, held="x"), [serving(0), serving(1)]).state is VersionState.IDLE
    )
    starting = observed(resting, served(JobState.DEPLOYING), [serving(0)])
    assert (starting.state, starting.reason) == (VersionState.IDLE, "starts: deploying: why")
    assert observed(starting, served(), [serving(0), serving(1)]).state is VersionState.READY
    parked = observed(resting, served(JobState.PARKED, held="parked by ruth"), [])
    assert parked.state is VersionState.IMPAIRED, "a person parked it: no request starts it"


def test_stages_that_need_other_batches_are_not_exact() -> None:
    same = observed(BEGUN, served(), [serving(0, unit="4"), serving(1, unit="4")])
    assert same.exact
    other = observed(BEGUN, served(), [serving(0, unit="4"), serving(1, unit="8")])
    assert (other.exact, other.inexact_because) == (
        False,
        "its stages need batches of different sizes: multiples of 4, 8",
    )


def test_one_stage_without_a_cache_is_a_version_without_one() -> None:
    assert observed(BEGUN, served(), [serving(0), serving(1)]).cached is None, "they do not say"
    kept = observed(BEGUN, served(), [serving(0, cached="true"), serving(1, cached="true")])
    assert (kept.cached, kept.uncached_because) == (True, "")
    bare = serving(1, cached="false", uncached_because="attention in 3 is not causal")
    mixed = observed(kept, served(), [serving(0, cached="true"), bare])
    assert (mixed.cached, mixed.uncached_because) == (False, "attention in 3 is not causal")


def test_stages_of_different_kinds_are_named_and_serve_nothing() -> None:
    assert of_different_kinds([serving(0), serving(1)]) == ""
    mixed = [serving(0), serving(0, 1), serving(1, kind="predict")]
    why = of_different_kinds(mixed)
    assert why == (
        "its stages are of different kinds: 0 generates tokens, 1 predicts tensors; say serve.kind in the "
        "job file"
    )
    found = observed(BEGUN, served(JobState.DEPLOYING), mixed)
    assert (found.state, found.kind, found.reason) == (VersionState.DEPLOYING, None, why)
    refused = observed(found, served(ends_as=JobState.FAILED, ends_because=why), mixed)
    assert (refused.state, refused.reason) == (VersionState.REFUSED, why)
