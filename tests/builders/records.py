"""What registers, and what the registry tells of it."""

from __future__ import annotations

from typing import Any

from schemas.envelope import EntityKind
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import RouteAdvertisement


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


def advertisement(*changed: ServiceRecord, revision: int = 1, **more: Any) -> RouteAdvertisement:
    """What changed since the revision before."""
    fields = {"previous": revision - 1} | more
    return RouteAdvertisement(revision=revision, changed=changed, **fields)
