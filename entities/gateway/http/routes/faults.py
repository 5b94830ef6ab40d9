"""The fault queue (draft §5.5): list it, read one fault, or follow it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from bus import subjects
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    FaultId,
    FirstEvent,
    HttpBearer,
    LastEventId,
    PageAsked,
    WantedJob,
    answer,
)
from entities.gateway.http.sse.format import fault_line, first_sequence
from entities.gateway.http.sse.response import STREAM, EventStream
from schemas.errors import NotFound
from schemas.fault import FaultRecord, FaultState
from schemas.pages import FaultPage


def faults(context: HttpContext) -> APIRouter:
    """The routes below `/v1/faults`."""
    router = APIRouter(prefix="/v1/faults", tags=["faults"])

    @router.get("", response_model=FaultPage)
    async def list_faults(
        bearer: HttpBearer,
        page: PageAsked,
        job: WantedJob = None,
        state: FaultState | None = None,
    ) -> Response:
        """Each fault as it stands now, oldest first."""
        records = (await bearer.run(context.jobs.faults(job))).faults
        matches = [fault for fault in records if state in (None, fault.state)]
        return page.of(FaultPage, matches, lambda fault: (fault.opened_at, fault.id))

    @router.get("/events", response_class=EventStream, responses=STREAM)
    async def follow(
        request: Request,
        bearer: HttpBearer,
        job: WantedJob = None,
        start: FirstEvent = None,
        last_event_id: LastEventId = None,
    ) -> EventStream:
        """Server-sent events: the records of the queue so far, then each new one."""
        await bearer.check("fault.read", job or "faults")
        tokens: dict[str, Any] = {} if job is None else {"job": job}
        first = first_sequence(start, last_event_id)
        records = context.hub.follow(subjects.FAULT_RECORD, tokens, fault_line, first)
        return context.stream(request, bearer, "fault.read", job or "faults", records)

    @router.get("/{fault}", response_model=FaultRecord)
    async def read(fault: FaultId, bearer: HttpBearer) -> Response:
        """One fault as it stands now."""
        for record in (await bearer.run(context.jobs.faults(None))).faults:
            if record.id == fault:
                return answer(record)
        raise NotFound(f"there is no fault {fault}; GET /v1/faults lists them")

    return router
