"""Operations on arrays of jobs, for both APIs: one request for all members, all or none (ADR-0087)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bus import subjects
from bus.wire.correlation import caller_span, correlate, current, current_cause, new_correlation
from entities.gateway.operations.access_client import Bearer
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import key_token
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.operation import Operation
from schemas.arrays import (
    ArrayAction,
    JobArray,
    OrderArray,
    SubmitArray,
    array_of,
    changes_between,
    member_specs,
)
from schemas.envelope import Envelope
from schemas.errors import BadJob, NotFound
from schemas.job import JobSpec
from schemas.signals import AccessDecision

ADMITTED = ("model", "code", "data", "initial_weights", "resume_from", "artifacts")
"""What admission reads and changes of a job file: URLs, arguments, code, versions of data sets."""


class ArrayOperations:
    """Submits and shows arrays, and gives orders to all their jobs. `jobs` admits each as it does a job."""

    def __init__(self, jobs: JobOperations, backends: Backends) -> None:
        self._jobs = jobs
        self._backends = backends

    def submit(
        self, bearer: Bearer, spec: JobSpec, *, cause: Envelope | None = None, key: str | None = None
    ) -> Operation[JobArray]:
        """Submits all members of a job file with `array`; a repetition is recognised as a job's is."""
        if current() is None:  # a client on the bus that sent no correlation
            correlate(new_correlation(), cause=current_cause())

        async def act(access: AccessDecision) -> JobArray:
            if spec.array is None:
                raise BadJob("array: missing; a file of one job is submitted with POST /v1/jobs")
            asked = await asyncio.to_thread(member_specs, spec)
            specs, may_read = await self._admitted(bearer, asked, access)
            await self._jobs.stored.admit_job(access)
            message = await asyncio.to_thread(_message, spec, specs, access, self._jobs.gateway, may_read)
            return await self._backends.command(
                subjects.SUBMIT_ARRAY,
                message,
                deadline_s=self._jobs.times.command_s,
                cause=cause if key is None else f"key.{key_token(access.user, key)}",
            )

        return Operation("job.submit", spec.name, act)

    async def _admitted(
        self, bearer: Bearer, asked: tuple[JobSpec, ...], access: AccessDecision
    ) -> tuple[list[JobSpec], tuple[str, ...]]:
        """The members in the form that is recorded; those that read the same are admitted once."""
        known: dict[str, JobSpec] = {}
        may_read: dict[str, None] = {}
        specs = []
        for number, member in enumerate(asked):
            if not number % 50:
                await asyncio.sleep(0)
            about = _without_numbers(member.model_dump(mode="json", exclude={"name"}), at_root=True)
            text = json.dumps(about, sort_keys=True)
            if text not in known:
                known[text], urls = await self._jobs.admitted(bearer, member, access)
                may_read |= dict.fromkeys(urls)
            recorded = known[text]
            specs.append(member.model_copy(update={name: getattr(recorded, name) for name in ADMITTED}))
        return specs, tuple(may_read)

    def read(self, array: str) -> Operation[JobArray]:
        """The array with all its members. Raises `NotFound`."""

        async def act(_: AccessDecision) -> JobArray:
            found = array_of(array, (await self._jobs.all_records()).jobs)
            if found is None or len(found.members) < found.size:  # this gateway has not heard of all yet
                found = array_of(array, (await self._jobs.asked_records()).jobs) or found
            if found is None:
                raise NotFound(f"there is no array {array}; list the jobs to see which there are")
            return found

        return Operation("job.read", array, act)

    def order(
        self,
        array: str,
        action: ArrayAction,
        reason: str = "",
        stages: int | None = None,
        replicas: int | None = None,
        priority: int | None = None,
    ) -> Operation[JobArray]:
        """Has all members cancelled, parked, resumed or prioritised that can be.

        Waiting ones are parked in the queue.
        """

        def message(access: AccessDecision) -> OrderArray:
            given = {"stages": stages, "replicas": replicas, "priority": priority, "quota": access.quota}
            return OrderArray(array=array, action=action, user=access.user, reason=reason, **given)

        return self._backends.operation(
            "job.change" if action == "prioritise" else f"job.{action}",
            array,
            subjects.ORDER_ARRAY,
            message,
            self._jobs.times.command_s,
            frees=action in ("cancel", "park"),
        )


def _message(
    spec: JobSpec, specs: list[JobSpec], access: AccessDecision, gateway: str, may_read: tuple[str, ...]
) -> SubmitArray:
    """The members as what they differ in from the first one: a thousand whole job files are too large."""
    assert spec.array is not None
    return SubmitArray(
        spec=specs[0].model_copy(update={"name": spec.name}),
        members=changes_between(specs[0], specs),
        paths=tuple(next(iter(spec.array.rows(0)))),
        limit=spec.array.limit,
        user=access.user,
        gateway=gateway,
        caller_span=caller_span(),
        quota=access.quota,
        may_read=may_read,
    )


def _without_numbers(value: Any, *, at_root: bool = False) -> Any:
    """A part of a job file in which all numbers are the same, but for the sections that are admitted."""
    if isinstance(value, dict):
        return {
            key: each if at_root and key in ADMITTED else _without_numbers(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_numbers(each) for each in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value
