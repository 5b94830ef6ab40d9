"""Messages as instances, registry and orchestrator send them, with the fields that policies read."""

from __future__ import annotations

from schemas.envelope import EntityKind
from schemas.job import JobEvent, JobState
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import RouteAdvertisement
from schemas.telemetry import InstanceSample


def sample(
    sid: str = "j-s0-r0", *, job: str = "j", step: int = 1, service_ms: float = 10.0, **more
) -> InstanceSample:
    fields = {
        "incarnation": "i1",
        "cluster": "east",
        "node": "n1",
        "stage": int(sid.split("-s")[1].split("-")[0]),
    }
    return InstanceSample(
        job=job, sid=sid, step=step, service_ms=service_ms, microbatches=4, **(fields | more)
    )


def record(sid: str, state: InstanceState = InstanceState.ACTIVE, *, job: str = "j", incarnation: str = "i1"):
    return ServiceRecord(
        sid=sid,
        prefix=f"train/{job}/stage/0",
        kind=EntityKind.INSTANCE,
        incarnation=incarnation,
        state=state,
        endpoint=Endpoint(cluster="east", node="n1"),
        job=job,
        stage=int(sid.split("-s")[1].split("-")[0]),
    )


def advertisement(*changed, removed=(), full=False, revision=1) -> RouteAdvertisement:
    return RouteAdvertisement(
        revision=revision, previous=revision - 1, full=full, changed=changed, removed=removed
    )


def job_event(state: JobState, *, job: str = "j") -> JobEvent:
    return JobEvent(job=job, kind="state", at=0.0, state=state)
