"""The gateways' request API over NATS: one subject, actions by name, answers as messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from bus.connection import Bus
from bus.logs import get_logger
from entities.gateway.array_operations import ArrayOperations
from entities.gateway.operations.access_client import Bearer
from entities.gateway.operations.idempotency import Answer, IdempotencyStore, request_digest
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.operation import Operation
from schemas.arrays import ArrayAction
from schemas.automation import limits_of
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadInput, BadJob, DmscError, InProgress
from schemas.gateway_api import DOOR_KEY, DoorKey, DoorRequest, JobList
from schemas.job import JobRecord, JobSpec
from schemas.names import is_array
from schemas.policy import ModuleLifecycle

Value = TypeVar("Value")

log = get_logger("gateway")

WHY = "asked for at the NATS door"


class NatsDoor:
    """Answers clients' requests over NATS."""

    def __init__(
        self, bus: Bus, jobs: JobOperations, arrays: ArrayOperations, idempotency: IdempotencyStore
    ) -> None:
        self._bus = bus
        self._jobs = jobs
        self._arrays = arrays
        self._idempotency = idempotency

    async def answer(self, request: DoorRequest, envelope: Envelope) -> Message:
        """Handles `DOOR`. Jobs, also a single one, come as a `JobList`; others as their own type."""
        begun = time.monotonic()
        outcome = "internal"
        try:
            reply = await self._act(request, envelope)
            outcome = "ok"
            return reply
        except DmscError as error:
            outcome = error.code
            raise
        finally:
            log.info(
                "door request",
                action=request.action,
                job=request.job,
                client=envelope.sender.name,
                outcome=outcome,
                ms=round(1e3 * (time.monotonic() - begun), 1),
            )

    async def _act(self, request: DoorRequest, envelope: Envelope) -> Message:
        if request.action == DOOR_KEY:
            return DoorKey(key=self._bus.keyring.of_kind(EntityKind.GATEWAY))
        bearer = Bearer(request.token, self._jobs.access)
        modules = self._jobs.modules
        operations: dict[str, Callable[[], Operation[Message]]] = {
            "job.submit": lambda: self._submission(bearer, _spec(request), envelope),
            "job.list": self._jobs.list,
            **{action: partial(self._of_job, action, request) for action in _ORDERS},
            "job.recut": lambda: self._jobs.recut(
                _job(request), request.plan, request.revision, dry_run=request.dry_run
            ),
            "mesh.read": self._jobs.mesh,
            "plan.make": lambda: self._jobs.plan(
                bearer, _given(request, request.plan_body, "plan_body", "what to plan")
            ),
            "policy.list": modules.modules,
            "policy.order": lambda: modules.order(
                _module(request), _given(request, request.order, "order", "its body")
            ),
            "policy.ask": lambda: modules.ask(
                _module(request), _given(request, request.question, "ask", "its body")
            ),
            "policy.automation": lambda: (
                modules.automation(request.job)
                if request.mode is None and request.objective is None and request.budget is None
                else modules.automate(
                    request.job, request.mode, request.objective, limits_of(request.budget or "")
                )
            ),
            "observation.write": lambda: modules.observe(bearer, request.observations),
        }
        if request.action not in operations:
            raise BadInput(f"{request.action}: unknown action; there are {', '.join(operations)}")
        operation = operations[request.action]()
        answers = _ONCE.get(request.action)
        if answers is not None:
            return await self._once(bearer, request, envelope, operation, answers)
        reply = await bearer.run(operation)
        return JobList(jobs=(reply,)) if isinstance(reply, JobRecord) else reply

    def _submission(self, bearer: Bearer, spec: JobSpec, cause: Envelope) -> Operation[Any]:
        by = self._jobs.submit if spec.array is None else self._arrays.submit
        return by(bearer, spec, cause=cause)

    def _of_job(self, action: str, request: DoorRequest) -> Operation[Any]:
        """What is asked for, about one job or all jobs of an array."""
        job, jobs = _job(request), self._jobs
        if is_array(job):
            order = _ORDERS[action]
            if order is None:
                return self._arrays.read(job)
            return self._arrays.order(job, order, WHY, priority=_priority(request))
        if action in ("job.cancel", "job.park"):
            return jobs.cancel(job, WHY) if action == "job.cancel" else jobs.park(job, WHY)
        if (priority := _priority(request)) is not None:
            return jobs.prioritise(job, priority)
        return jobs.resume(job) if action == "job.resume" else jobs.read(job)

    async def _once(
        self,
        bearer: Bearer,
        request: DoorRequest,
        envelope: Envelope,
        operation: Operation[Message],
        answers: type[Message],
    ) -> Message:
        """Runs the operation and returns its answer; a repetition, through any gateway, gets the first one.

        The request's secrets are bound to the envelope's id: an eavesdropper could only repeat the request.
        """
        access = await bearer.check(operation.action, operation.resource)
        body = request.model_dump_json(exclude={"token"}).encode()
        digest = request_digest("NATS", request.action, "", body)

        async def act() -> Answer:
            return Answer((await operation.act(access)).model_dump_json())

        deadline = time.monotonic() + self._jobs.times.command_s
        while True:
            try:
                stored = await self._idempotency.once(access.user, f"door {envelope.id}", digest, act)
                return answers.model_validate_json(stored.body)
            except InProgress:  # another gateway is answering this request: wait for its answer
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(self._jobs.times.pause_s)


_ORDERS: dict[str, ArrayAction | None] = {
    "job.read": None,
    "job.cancel": "cancel",
    "job.park": "park",
    "job.resume": "resume",
    "job.prioritise": "prioritise",
}
"""Actions about one job or one array, with the order that an array gets."""

_ONCE: dict[str, type[Message]] = {"policy.order": ModuleLifecycle, "observation.write": Ack}
"""Actions over NATS that are done once, however often the request comes, with the types of their answers."""


def _spec(request: DoorRequest) -> JobSpec:
    if request.spec is None:
        raise BadJob("spec: missing; job.submit needs the job's specification")
    return request.spec


def _job(request: DoorRequest) -> str:
    return _given(request, request.job, "job", "a job's id")


def _priority(request: DoorRequest) -> int | None:
    """The class that is asked for; None: the request is another one."""
    if request.action != "job.prioritise":
        return None
    return _given(request, request.priority, "priority", "the new class")


def _module(request: DoorRequest) -> str:
    return _given(request, request.module, "module", "a module's name")


def _given(request: DoorRequest, value: Value | None, name: str, what: str) -> Value:
    if value is None:
        raise BadInput(f"{name}: missing; {request.action} needs {what}")
    return value
