"""The HTTP door's part for operators: the fault queue, and which nodes get no new instances."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import StreamingResponse

from bus.connection import Bus
from entities.gateway.desk import Desk
from entities.gateway.events import EventsConfig, fault_records, first_sequence
from schemas.base import is_token
from schemas.door import Cordons, FaultList
from schemas.errors import NotFound, Refused

Authorization = Annotated[str | None, Header(description="Bearer TOKEN")]
Job = Annotated[str | None, Query(description="only faults of this job; default: all")]
Slot = Annotated[int | None, Query(ge=0, description="one slot; default: the whole node")]
Reason = Annotated[str, Query(max_length=200)]
_BEARER = re.compile(r"^[Bb]earer +(\S+) *$")


def add_operations(app: FastAPI, bus: Bus, desk: Desk, events: EventsConfig) -> None:
    """Adds the routes."""

    @app.get("/v1/faults", response_model=FaultList, tags=["faults"])
    async def faults(authorization: Authorization = None, job: Job = None) -> Response:
        """Each fault as it stands now, oldest first, at most the latest 1,000."""
        return _json(await desk.faults(bearer(authorization), None if job is None else job_id(job)))

    @app.get("/v1/faults/events", tags=["faults"])
    async def follow(
        authorization: Authorization = None,
        job: Job = None,
        start: Annotated[int | None, Query(ge=1, description="first sequence; default: all")] = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """Server-sent events: every record of the queue, replayed, then followed."""
        wanted = None if job is None else job_id(job)
        access = await desk.guard.check(bearer(authorization), "fault.read", wanted or "faults")
        return StreamingResponse(
            desk.guard.while_valid(
                access, fault_records(bus, wanted, first_sequence(start, last_event_id), events)
            ),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @app.post("/v1/nodes/{node}/cordon", response_model=Cordons, tags=["nodes"])
    async def cordon(
        node: str, authorization: Authorization = None, slot: Slot = None, reason: Reason = ""
    ) -> Response:
        """No new instances on this node, or in this slot of it."""
        return _json(await desk.cordon(bearer(authorization), _node(node), slot, reason, drain=False))

    @app.post("/v1/nodes/{node}/drain", response_model=Cordons, tags=["nodes"])
    async def drain(node: str, authorization: Authorization = None, reason: Reason = "") -> Response:
        """Cordon, and move what runs there elsewhere. Answers at once; `progress` in `/v1/mesh` tells on."""
        return _json(await desk.cordon(bearer(authorization), _node(node), None, reason, drain=True))

    @app.post("/v1/nodes/{node}/uncordon", response_model=Cordons, tags=["nodes"])
    async def uncordon(node: str, authorization: Authorization = None, slot: Slot = None) -> Response:
        """New instances may go there again."""
        return _json(await desk.uncordon(bearer(authorization), _node(node), slot))


def bearer(authorization: str | None) -> str:
    """The token of an `Authorization` header. Raises `Refused`."""
    found = _BEARER.match(authorization or "")
    if found is None:
        raise Refused("no token; send the header Authorization: Bearer TOKEN")
    return found.group(1)


def job_id(job: str) -> str:
    """A job's id as it came in a request. Raises `NotFound` where it can't be one."""
    if not is_token(job):
        raise NotFound("there is no such job; an id has only letters, digits, _ and -")
    return job


def instance_id(sid: str) -> str:
    """An instance's SID as it came in a request. Raises `NotFound` where it can't be one."""
    if not is_token(sid):
        raise NotFound("there is no such instance; an id has only letters, digits, _ and -")
    return sid


def _node(node: str) -> str:
    if not is_token(node):
        raise NotFound("there is no such node; a name has only letters, digits, _ and -")
    return node


def _json(message: FaultList | Cordons) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")
