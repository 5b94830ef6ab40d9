"""Operations on model services, each checked by Type 3 first."""

from __future__ import annotations

from typing import Any, Literal

from bus import subjects
from entities.gateway.operations.access_client import Bearer
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import key_token
from entities.gateway.operations.jobs import JobOperations
from entities.gateway.operations.operation import Operation
from schemas.errors import BadJob, NotFound
from schemas.job import JobSpec
from schemas.services.model_service import (
    DeployVersion,
    ModelService,
    OrderService,
    ServiceList,
    ServiceQuery,
    TrafficBody,
)
from schemas.signals import AccessDecision, Role

TRAFFIC = "service.traffic"
CHANGE = "service.change"
OF_JOB = "job:"
"""Begins `initial_weights` that are what a job has trained: `job:j1a2b3c`."""


class ServiceOperations:
    """What clients may ask of services. `jobs`: the operations on jobs, beside these."""

    def __init__(self, backends: Backends, jobs: JobOperations) -> None:
        self._backends = backends
        self._jobs = jobs
        self._query_s, self._command_s = jobs.times.query_s, jobs.times.command_s

    def deploy(self, bearer: Bearer, spec: JobSpec, *, key: str | None = None) -> Operation[ModelService]:
        """Has a version run that the file describes.

        Raises:
            BadJob: it names what it may not, or does not say what it serves.
            Refused: it names what its user may not read; or the service is another user's.
            NotFound: there is no such job whose weights it is to serve.
            Conflict: the service has a version of this name, or the job has no weights.
        """
        if spec.serve is None:
            raise BadJob("serve: is missing: it names the service, as serve: {service: chat}")

        async def act(access: AccessDecision) -> ModelService:
            recorded, may_read = await self._jobs.admitted(bearer, await self._with_weights(spec), access)
            await self._jobs.stored.admit_job(access)
            message = DeployVersion(
                spec=recorded,
                user=access.user,
                tenant="" if access.quota is None else access.quota.queue.tenant,
                gateway=self._jobs.gateway,
                quota=access.quota,
                may_read=may_read,
                over_others=access.role in (Role.OPERATOR, Role.ADMIN),
            )
            return await self._backends.command(
                subjects.DEPLOY_VERSION,
                message,
                deadline_s=self._command_s,
                cause=None if key is None else f"key.{key_token(access.user, key)}",
            )

        return Operation("service.deploy", spec.serve.service, act)

    async def _with_weights(self, spec: JobSpec) -> JobSpec:
        """The file with the URL of a job's weights where it names the job; rights to them are checked later.

        Raises:
            NotFound: there is no such job.
            BadJob: it has no weights.
        """
        url = spec.weights_url or ""
        if spec.initial_weights is None or not url.startswith(OF_JOB):
            return spec
        job = url.removeprefix(OF_JOB)
        found = next((record for record in (await self._jobs.all_records()).jobs if record.job == job), None)
        if found is None:
            raise NotFound(f"initial_weights: there is no job {job}; `dmsc jobs` lists them", job=job)
        if found.weights is None:
            raise BadJob(f"initial_weights: job {job} is {found.state} and has no weights")
        made = {"url": found.weights.url, "sha256": found.weights.sha256}
        source = spec.initial_weights.model_copy(update=made)
        return spec.model_copy(update={"initial_weights": source})

    def list(self, service: str | None = None) -> Operation[ServiceList]:
        """One service, or all of them. Raises `NotFound`."""
        return self._backends.operation(
            "service.read",
            service or "services",
            subjects.SERVICES_QUERY,
            lambda _: ServiceQuery(service=service),
            self._query_s,
        )

    def set_traffic(self, service: str, body: TrafficBody) -> Operation[ModelService]:
        """Shares traffic among versions that are ready.

        Raises:
            BadInput: the weights are not 10,000 in all.
            Conflict: a version is not ready; or the record is another one by now.
        """
        return self._order(
            TRAFFIC, service, "traffic", weights=body.weights, expected=body.expected, why=body.why
        )

    def change(
        self,
        service: str,
        action: Literal["promote", "rollback", "shadow", "unshadow", "scale", "stop"],
        **more: Any,
    ) -> Operation[ModelService]:
        """Changes a service otherwise. `more`: fields of `OrderService`."""
        needs = CHANGE if action in ("scale", "stop") else TRAFFIC
        return self._order(needs, service, action, frees=action == "stop", **more)

    def _order(
        self, needs: str, service: str, action: str, *, frees: bool = False, **more: Any
    ) -> Operation[ModelService]:
        def message(access: AccessDecision) -> OrderService:
            fields = {"service": service, "action": action, "user": access.user, "quota": access.quota}
            return OrderService.model_validate({**fields, **more})

        return self._backends.operation(
            needs, service, subjects.ORDER_SERVICE, message, self._command_s, frees=frees
        )
