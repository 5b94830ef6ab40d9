"""Functional modules: list them, order and query them, send observations, and switch the active version."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    HttpBearer,
    IdempotencyKey,
    JobId,
    ModuleName,
    PageAsked,
    Reason,
    answer,
    body_of,
    parse,
    read_body,
)
from schemas.automation import LIMITS, Automation, AutomationStatus, limits_of
from schemas.changes import JobObjective
from schemas.errors import Ack
from schemas.learnt_state import LearntBody, LearntStates
from schemas.module_status import ModuleAnswer, OrderBody, QuestionBody
from schemas.observation import ObservationBatch
from schemas.pages import PolicyPage
from schemas.policy import ModuleLifecycle, PolicySwitch

Version = Annotated[str, Query(min_length=1, max_length=100, description="as `dmsc policy list` shows it")]
Budget = Annotated[
    str,
    Query(
        min_length=1,
        max_length=200,
        pattern=LIMITS,
        description="limits to set, as `cost=12,energy=none`; `none` lifts one",
    ),
]


def policies(context: HttpContext) -> APIRouter:
    """The routes below `/v1/policies`, and `/v1/observations`."""
    router = APIRouter(prefix="/v1", tags=["policies"])
    operations = context.jobs.modules

    @router.get("/policies", response_model=PolicyPage)
    async def modules(bearer: HttpBearer, page: PageAsked) -> Response:
        """The functional modules that run, with their state and counts."""
        running = (await bearer.run(operations.modules())).modules
        return page.of(PolicyPage, running, lambda module: (module.module, module.version, module.sid or ""))

    @router.post(
        "/policies/{module}/orders", response_model=ModuleLifecycle, openapi_extra=body_of(OrderBody)
    )
    async def order(module: ModuleName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Activate, shadow or drain a module, or enable or disable it for jobs. Answers its new state."""
        text = await context.body(keyed)
        body = parse(OrderBody, text)
        return await context.command(keyed, bearer, operations.order(module, body), text)

    @router.post(
        "/policies/{module}/questions", response_model=ModuleAnswer, openapi_extra=body_of(QuestionBody)
    )
    async def question(module: ModuleName, request: Request, bearer: HttpBearer) -> Response:
        """Ask a module what it suggests for a job at this moment. The suggestion is not adopted."""
        body = parse(QuestionBody, await read_body(request, context.config.max_job_bytes))
        return answer(await bearer.run(operations.ask(module, body)))

    @router.get("/policies/{module}/state", response_model=LearntStates)
    async def learnt(module: ModuleName, bearer: HttpBearer, version: Version | None = None) -> Response:
        """What the versions of a module have learnt, as it is kept on the bus; canonical JSON in `data`."""
        return answer(await bearer.run(operations.learnt(module, version)))

    @router.post("/policies/{module}/state", response_model=LearntStates, openapi_extra=body_of(LearntBody))
    async def replace_learnt(module: ModuleName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Replace what a module has learnt by a trained state, or by nothing; it takes it over at once."""
        text = await context.body(keyed)
        body = parse(LearntBody, text)
        return await context.command(keyed, bearer, operations.replace_learnt(module, body), text)

    @router.get("/automation", response_model=AutomationStatus)
    async def automation(bearer: HttpBearer) -> Response:
        """How far the mesh changes jobs by itself: off, advise or act."""
        return answer(await bearer.run(operations.automation(None)))

    @router.post("/automation", response_model=AutomationStatus)
    async def automate(mode: Automation, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Switch it. A job's own mode may be lower: then that one holds."""
        return await context.command(keyed, bearer, operations.automate(None, mode))

    @router.get("/jobs/{job}/automation", response_model=AutomationStatus)
    async def job_automation(job: JobId, bearer: HttpBearer) -> Response:
        """How far this job is changed by itself, for what objective, and who holds which of its knobs."""
        return answer(await bearer.run(operations.automation(job)))

    @router.post("/jobs/{job}/automation", response_model=AutomationStatus)
    async def automate_job(
        job: JobId,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        mode: Automation | None = None,
        objective: JobObjective | None = None,
        budget: Budget | None = None,
    ) -> Response:
        """Switch it: mode, objective and limits of the budget; what is not given stays.

        `act` also releases the knobs that persons have set.
        """
        limits = {} if budget is None else limits_of(budget)
        return await context.command(keyed, bearer, operations.automate(job, mode, objective, limits))

    @router.post(
        "/observations", status_code=202, response_model=Ack, openapi_extra=body_of(ObservationBatch)
    )
    async def observe(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Send observations of a system outside the mesh to the modules that subscribe to them."""
        text = await context.body(keyed)
        batch = parse(ObservationBatch, text)
        operation = operations.observe(bearer, batch.observations)
        return await context.command(keyed, bearer, operation, text, HTTPStatus.ACCEPTED)

    @router.post("/policies/{module}/promote", response_model=PolicySwitch)
    async def promote(
        module: ModuleName,
        version: Version,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        reason: Reason = "",
    ) -> Response:
        """Make this running version the active one. The former one runs on in shadow; both are scored."""
        return await context.command(keyed, bearer, operations.promote(module, version, reason))

    @router.post("/policies/{module}/rollback", response_model=PolicySwitch)
    async def rollback(
        module: ModuleName, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = ""
    ) -> Response:
        """Make the version active again that was active before the last promotion."""
        return await context.command(keyed, bearer, operations.roll_back(module, reason))

    return router
