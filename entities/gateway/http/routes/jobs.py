"""Jobs and arrays: submit, list, read, scale, move, recut, park, resume, prioritise, cancel; who waits."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from bus import subjects
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    FirstEvent,
    HttpBearer,
    IdempotencyKey,
    JobId,
    LastEventId,
    PageAsked,
    Reason,
    answer,
    body_of,
    named,
    parse,
)
from entities.gateway.http.sse.format import first_sequence, job_line
from entities.gateway.http.sse.response import STREAM, EventStream
from schemas.arrays import JobArray
from schemas.base import TOKEN_PATTERN
from schemas.errors import Ack, BadJob
from schemas.gateway_api import JobLoad
from schemas.job import JobRecord, JobSpec, JobState
from schemas.job_file.parallel import MOST_INSTANCES, MOST_STAGES
from schemas.job_file.queue import Priority
from schemas.pages import JobPage
from schemas.plans import PlanBody, PlanMade
from schemas.queue import QueueStatus, ReservationName, Reservations, ReservationSpec
from schemas.recut import MOST_PLAN_TEXT, MOST_REVISION, PLAN_PATTERN, RecutAnswer

ArrayId = Annotated[str, Path(json_schema_extra={"pattern": TOKEN_PATTERN}), named("array")]
NewStages = Annotated[int | None, Query(ge=1, le=MOST_STAGES, description="default: as before")]
NewPriority = Annotated[Priority, Query(description="its new class; higher comes first")]
NewReplicas = Annotated[int | None, Query(ge=1, le=MOST_INSTANCES, description="default: as before")]


def jobs(context: HttpContext) -> APIRouter:
    """The routes below `/v1/jobs` that are about the job itself."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
    operations = context.jobs

    @router.post("", status_code=201, response_model=JobRecord, openapi_extra=body_of(JobSpec))
    async def submit(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Submit a job: a JobSpec as JSON."""
        text = await context.body(keyed)
        spec = parse(JobSpec, text, BadJob)
        operation = operations.submit(bearer, spec, key=keyed.key)
        return await context.command(
            keyed, bearer, operation, text, HTTPStatus.CREATED, lambda record: f"/v1/jobs/{record.job}"
        )

    @router.get("", response_model=JobPage)
    async def list_jobs(
        bearer: HttpBearer,
        page: PageAsked,
        state: Annotated[JobState | None, Query(description="only jobs in this state")] = None,
        user: Annotated[str | None, Query(max_length=200, description="only this user's")] = None,
    ) -> Response:
        """The mesh's jobs in the order of their submission."""
        jobs = (await bearer.run(operations.list())).jobs
        matches = [record for record in jobs if state in (None, record.state) and user in (None, record.user)]
        return page.of(JobPage, matches, lambda record: (record.submitted_at, record.job))

    @router.get("/{job}", response_model=JobRecord)
    async def read(job: JobId, bearer: HttpBearer) -> Response:
        """The job's record."""
        return answer(await bearer.run(operations.read(job)))

    @router.get("/{job}/load", response_model=JobLoad)
    async def load(job: JobId, bearer: HttpBearer) -> Response:
        """Queue, service time and latency of each of its instances at this moment."""
        return answer(await bearer.run(operations.load(job)))

    @router.post("/{job}/scale", response_model=Ack)
    async def scale(
        job: JobId,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        replicas: Annotated[int, Query(ge=1, le=MOST_INSTANCES)],
        stage: Annotated[
            int | None, Query(ge=0, le=MOST_INSTANCES, description="default: each stage")
        ] = None,
        unit: Annotated[
            str,
            Query(max_length=64, description="`data`, or a function of data.preprocess, instead of a stage"),
        ] = "",
    ) -> Response:
        """Set the number of working replicas of one stage, or of each; they join and leave between steps."""
        return await context.command(keyed, bearer, operations.scale(job, replicas, stage, unit))

    @router.post("/{job}/move", response_model=Ack)
    async def move(
        job: JobId,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        sid: Annotated[str, Query(pattern=r"^[A-Za-z0-9_-]{1,120}$")],
        stage: Annotated[int, Query(ge=0, le=MOST_INSTANCES)],
    ) -> Response:
        """Take an instance out of its stage at the end of the step; its slot then hosts one of `stage`."""
        return await context.command(keyed, bearer, operations.change_stage(job, sid, stage))

    @router.post("/{job}/recut", response_model=RecutAnswer)
    async def recut(
        job: JobId,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        plan: Annotated[
            str | None,
            Query(
                max_length=MOST_PLAN_TEXT,
                json_schema_extra={"pattern": PLAN_PATTERN},
                description="the layers of each stage, like `0-3,4-7`; default: the planner's choice",
            ),
        ] = None,
        revision: Annotated[
            int | None,
            Query(ge=0, le=MOST_REVISION, description="of the plan that was seen; of another one: refused"),
        ] = None,
        dry_run: Annotated[bool, Query(description="say what it would be, and change nothing")] = False,
    ) -> Response:
        """Give the stages of a running job other layers; training goes on, to the same bits."""
        operation = operations.recut(job, plan, revision, dry_run=dry_run)
        return await context.command(keyed, bearer, operation)

    @router.post("/{job}/park", response_model=JobRecord)
    async def park(job: JobId, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = "") -> Response:
        """Park a job: it waits without slots until it is resumed. Users park their own, operators any."""
        return await context.command(keyed, bearer, operations.park(job, reason))

    @router.post("/{job}/resume", response_model=JobRecord)
    async def resume(
        job: JobId,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        stages: NewStages = None,
        replicas: NewReplicas = None,
    ) -> Response:
        """Resume a parked job as soon as slots are free, in another shape if one is given."""
        return await context.command(keyed, bearer, operations.resume(job, stages, replicas))

    @router.post("/{job}/prioritise", response_model=JobRecord)
    async def prioritise(
        job: JobId, bearer: HttpBearer, keyed: IdempotencyKey, priority: NewPriority
    ) -> Response:
        """Give a job another class of priority; all are ranked anew at once, as the queue's order says."""
        return await context.command(keyed, bearer, operations.prioritise(job, priority))

    @router.post("/{job}/cancel", response_model=JobRecord)
    async def cancel(job: JobId, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = "") -> Response:
        """Cancel a job. Users cancel their own, operators any."""
        return await context.command(keyed, bearer, operations.cancel(job, reason or "asked for over HTTP"))

    @router.get("/{job}/events", response_class=EventStream, responses=STREAM)
    async def events(
        job: JobId,
        request: Request,
        bearer: HttpBearer,
        start: FirstEvent = None,
        last_event_id: LastEventId = None,
    ) -> EventStream:
        """Server-sent events: those so far, then each new one until the job has ended (docs/gateway.md)."""
        await bearer.run(operations.read(job))
        records = context.hub.follow(
            subjects.JOB_EVENT,
            {"job": job},
            job_line,
            first_sequence(start, last_event_id),
            lambda: operations.cache.has_ended(job),
        )
        return context.stream(request, bearer, "job.read", job, records)

    return router


def arrays(context: HttpContext) -> APIRouter:
    """The routes below `/v1/arrays`. Each member is a job as well, below `/v1/jobs`."""
    router = APIRouter(prefix="/v1/arrays", tags=["arrays"])
    operations = context.arrays

    @router.post("", status_code=201, response_model=JobArray, openapi_extra=body_of(JobSpec))
    async def submit(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Submit all jobs of a JobSpec with `array`, or none of them."""
        text = await context.body(keyed)
        operation = operations.submit(bearer, parse(JobSpec, text, BadJob), key=keyed.key)
        return await context.command(
            keyed, bearer, operation, text, HTTPStatus.CREATED, lambda made: f"/v1/arrays/{made.array}"
        )

    @router.get("/{array}", response_model=JobArray)
    async def read(array: ArrayId, bearer: HttpBearer) -> Response:
        """The array: its members by index, and how many are in which state."""
        return answer(await bearer.run(operations.read(array)))

    @router.post("/{array}/cancel", response_model=JobArray)
    async def cancel(
        array: ArrayId, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = ""
    ) -> Response:
        """Cancel all its jobs that have not ended."""
        why = reason or "asked for over HTTP"
        return await context.command(keyed, bearer, operations.order(array, "cancel", why))

    @router.post("/{array}/park", response_model=JobArray)
    async def park(
        array: ArrayId, bearer: HttpBearer, keyed: IdempotencyKey, reason: Reason = ""
    ) -> Response:
        """Park its running jobs, and hold the waiting ones, until they are resumed."""
        return await context.command(keyed, bearer, operations.order(array, "park", reason))

    @router.post("/{array}/resume", response_model=JobArray)
    async def resume(
        array: ArrayId,
        bearer: HttpBearer,
        keyed: IdempotencyKey,
        stages: NewStages = None,
        replicas: NewReplicas = None,
    ) -> Response:
        """Resume its parked and held jobs, in another shape if one is given."""
        order = operations.order(array, "resume", stages=stages, replicas=replicas)
        return await context.command(keyed, bearer, order)

    @router.post("/{array}/prioritise", response_model=JobArray)
    async def prioritise(
        array: ArrayId, bearer: HttpBearer, keyed: IdempotencyKey, priority: NewPriority
    ) -> Response:
        """Give all its jobs that have not ended another class of priority."""
        order = operations.order(array, "prioritise", priority=priority)
        return await context.command(keyed, bearer, order)

    return router


def queue(context: HttpContext) -> APIRouter:
    """The routes below `/v1/queue`."""
    router = APIRouter(prefix="/v1/queue", tags=["queue"])

    @router.get("", response_model=QueueStatus)
    async def read(bearer: HttpBearer) -> Response:
        """The waiting jobs in their order, each with its reason."""
        return answer(await bearer.run(context.jobs.queue()))

    @router.get("/reservations", response_model=Reservations)
    async def reservations(bearer: HttpBearer) -> Response:
        """Slots that are kept for a user or job, by their start."""
        return answer(await bearer.run(context.jobs.reservations()))

    @router.post("/reservations", response_model=Reservations)
    async def reserve(spec: ReservationSpec, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Keep slots for a user or job, from one time until another; for operators."""
        return await context.command(keyed, bearer, context.jobs.reserve(spec))

    @router.delete("/reservations/{name}", response_model=Reservations)
    async def cancel_reservation(name: Annotated[ReservationName, Path()], bearer: HttpBearer) -> Response:
        """Cancel a reservation; its slots are free for all."""
        return answer(await bearer.run(context.jobs.cancel_reservation(name)))

    @router.get("/{job}", response_model=QueueStatus)
    async def explain(job: JobId, bearer: HttpBearer) -> Response:
        """One waiting job: its place, what blocks it, its expected start, what would change that."""
        return answer(await bearer.run(context.jobs.queue(job)))

    return router


def plans(context: HttpContext) -> APIRouter:
    """`/v1/plans`: what a job would get, before it is submitted."""
    router = APIRouter(prefix="/v1/plans", tags=["jobs"])

    @router.post("", response_model=PlanMade, openapi_extra=body_of(PlanBody))
    async def make(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Plan a job on the mesh's slots: stages, places, the time of a step and why; nothing is started."""
        text = await context.body(keyed)
        question = parse(PlanBody, text, BadJob)
        return await context.command(keyed, bearer, context.jobs.plan(bearer, question), text)

    return router
