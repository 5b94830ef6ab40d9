"""Fault injection: an operator has a node agent kill, freeze or resume an instance.

The fault is not announced to the mesh, which has to detect it by itself; so it is with `dmsc chaos`, which
injects faults into processes from outside (ADR-0010). Both are recorded on the audit stream, which no
recovery reads: faults of this API before they are injected, those of `dmsc chaos` when it reports them.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Response

from bus import subjects
from bus.logs import get_logger
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, body_of, parse
from entities.gateway.operations.operation import Operation
from schemas.cluster import Strike, Struck
from schemas.errors import Conflict, NotFound
from schemas.names import agent_name
from schemas.pages import OutsideFault, StrikeBody
from schemas.registry import InstanceState
from schemas.signals import AccessDecision

log = get_logger("door")


def chaos(context: HttpContext, timeout_s: float = 5.0) -> APIRouter:
    """`/v1/chaos/faults`, `/v1/chaos/outside`.

    `timeout_s`: for the agent's answer. The request is never repeated: that would be another fault.
    """
    router = APIRouter(prefix="/v1/chaos", tags=["chaos"])

    @router.post("/faults", status_code=202, response_model=Struck, openapi_extra=body_of(StrikeBody))
    async def strike(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Kill, freeze or resume an instance; for operators. `/v1/faults` shows what the mesh detects."""
        text = await context.body(keyed)
        body = parse(StrikeBody, text)

        async def act(access: AccessDecision) -> Struck:
            record = context.records.get(body.sid)
            over = (InstanceState.FAULTED, InstanceState.GONE)
            if record is None or record.job is None or record.state in over:
                raise NotFound(f"no instance {body.sid} runs; GET /v1/instances lists them")
            if body.incarnation not in (None, record.incarnation):
                raise Conflict(f"{body.sid} is {record.incarnation} by now, not {body.incarnation}")
            agent = agent_name(record.endpoint.cluster, record.endpoint.node)
            order = Strike(sid=body.sid, incarnation=record.incarnation, fault=body.fault, user=access.user)
            struck = await context.backends.request(subjects.STRIKE, order, timeout_s=timeout_s, agent=agent)
            log.warning("fault ordered", fault=body.fault, sid=body.sid, user=access.user, agent=agent)
            return struck

        operation = Operation("chaos.strike", body.sid, act)
        return await context.command(keyed, bearer, operation, text, HTTPStatus.ACCEPTED)

    @router.post(
        "/outside", status_code=202, response_model=OutsideFault, openapi_extra=body_of(OutsideFault)
    )
    async def outside(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Record on the audit stream that a process was killed or frozen from outside; for operators.

        `dmsc chaos` does so for each fault that it injects. Nothing else follows from it.
        """
        text = await context.body(keyed)
        body = parse(OutsideFault, text)

        async def act(access: AccessDecision) -> OutsideFault:
            log.warning("fault from outside", fault=body.fault, victim=body.victim, user=access.user)
            return body

        operation = Operation("chaos.outside", f"{body.victim} ({body.fault})", act)
        return await context.command(keyed, bearer, operation, text, HTTPStatus.ACCEPTED)

    return router
