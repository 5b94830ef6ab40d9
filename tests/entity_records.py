"""Records and messages as the entities' tests need them, with the fields that matter as arguments."""

from __future__ import annotations

from typing import Any

from schemas.envelope import EntityKind
from schemas.job import JobRecord, JobSpec, JobState
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import CommunicationPolicy, ComputeEntry, StagePolicy
from schemas.telemetry import InstanceSample, LinkSample


def instance(
    sid: str = "j-s0-r0",
    *,
    incarnation: str = "i1",
    state: InstanceState = InstanceState.ACTIVE,
    cluster: str = "east",
    **more: Any,
) -> ServiceRecord:
    """An instance's record; job and stage come from the SID (`j-s0-r0`, `j-data-r0`)."""
    job, unit = sid.rsplit("-", 2)[0:2]
    stage = -1 if unit == "data" else int(unit[1:])
    fields = {
        "prefix": f"train/{job}/data" if stage < 0 else f"train/{job}/stage/{stage}",
        "kind": EntityKind.INSTANCE,
        "endpoint": Endpoint(cluster=cluster, node=f"{cluster}-n1"),
        "job": job,
        "stage": stage,
        "tags": (f"stage:{stage}", f"job:{job}"),
    }
    return ServiceRecord(sid=sid, incarnation=incarnation, state=state, **(fields | more))


def service(sid: str = "gateway-east", *, incarnation: str = "g1", **more: Any) -> ServiceRecord:
    """A gateway's record."""
    fields = {
        "prefix": "entity/gateway/east",
        "kind": EntityKind.GATEWAY,
        "endpoint": Endpoint(cluster="east", node="n1"),
        "state": InstanceState.ACTIVE,
    }
    return ServiceRecord(sid=sid, incarnation=incarnation, **(fields | more))


def policy(job: str = "j", revision: int = 1, **more: Any) -> CommunicationPolicy:
    """A policy of two stages, window 4, no weights."""
    fields = {
        "entry_gateway": "gateway-east",
        "clusters": ("east", "west"),
        "stages": (StagePolicy(stage=0, window=4), StagePolicy(stage=1, window=4)),
        "reason": "initial",
    }
    return CommunicationPolicy(job=job, revision=revision, **(fields | more))


def sample(sid: str = "j-s0-r0", **more: Any) -> InstanceSample:
    """A sample with one link: 10 transfers of 2 ms, 1 kB each."""
    record = instance(sid)
    fields = {
        "job": record.job,
        "incarnation": "i1",
        "cluster": "east",
        "node": "east-n1",
        "stage": record.stage,
        "step": 1,
        "service_ms": 5.0,
        "tokens_per_s": 100.0,
        "links": (LinkSample(peer="j-s1-r0", sent_bytes=10_000, transfers=10, transfer_ms=20.0),),
    }
    return InstanceSample(sid=sid, **(fields | more))


def compute(sid: str = "j-s0-r0", **more: Any) -> ComputeEntry:
    """A stage-0 instance in Type 4: idle, 5 ms."""
    fields = {"job": "j", "stage": 0, "incarnation": "i1", "state": InstanceState.ACTIVE, "service_ms": 5.0}
    return ComputeEntry(sid=sid, **(fields | more))


def spec(**more: Any) -> JobSpec:
    """The smallest job."""
    document = {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}}
    return JobSpec.model_validate(document | more)


def job(job_id: str = "tiny-1", state: JobState = JobState.RUNNING, **more: Any) -> JobRecord:
    """The orchestrator's record of it."""
    return JobRecord(job=job_id, spec=spec(), state=state, submitted_at=1.0, changed_at=1.0, **more)
