"""The record by which an entity's service is registered (draft §4.3 Type 1), and its registration."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from bus.connection import Bus
from bus.mesh.registration import RegistrationClient
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from schemas.registry import Capability, Endpoint, InstanceState, ServiceRecord, service_tag


def entity_record(
    kind: EntityKind,
    sid: str,
    incarnation: str,
    *,
    node: str,
    cluster: str = "",
    state: InstanceState = InstanceState.ACTIVE,
    reason: str = "",
    services: Iterable[str] = (),
    **endpoint: Any,
) -> ServiceRecord:
    """The record of a service of `cluster`, or of the whole mesh; `endpoint` has further fields of that.

    `services`: what it does for others, by which it is found (tags).

    Its capability is what the node has (draft §4.4(1)): it shares that with whatever else runs there.
    """
    return ServiceRecord(
        sid=sid,
        prefix=f"entity/{kind.value}/{cluster}" if cluster else f"entity/{kind.value}",
        kind=kind,
        incarnation=incarnation,
        state=state,
        endpoint=Endpoint(cluster=cluster or "mesh", node=node, **endpoint),
        capability=Capability(
            device_name=platform.machine(),
            memory_bytes=psutil.virtual_memory().total,
            cores=os.cpu_count() or 1,
        ),
        tags=tuple(map(service_tag, services)),
        reason=reason,
    )


async def stay_registered(
    bus: Bus, record: ServiceRecord, report: Callable[..., object], *, retry_s: float
) -> None:
    """Keep `record` registered until cancelled, or until another incarnation has taken its name.

    `report` logs why it is not registered; `retry_s` is the pause before the next attempt.
    """
    while True:
        try:
            async with RegistrationClient(bus, record) as registration:
                await registration.fenced.wait()
            report("the registry knows another one in our place", sid=record.sid)
            return
        except DmscError as error:
            report("not registered", sid=record.sid, reason=error.text)
        await asyncio.sleep(retry_s)
