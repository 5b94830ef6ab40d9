"""All model services of one term: orders about them, and their records by compare-and-set (ADR-0140)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from bus import subjects
from bus.logs import get_logger
from bus.messaging.key_value import KeyValueEntry
from entities.orchestrator.job.job_runs import JobRuns
from entities.orchestrator.job.services import service_rules
from entities.orchestrator.job.services.version_state import OVER, observed
from entities.orchestrator.job.term import TermContext, insistently
from entities.orchestrator.job_state.owned_record import OwnedRecord
from schemas.actions import ServiceAction
from schemas.envelope import Envelope
from schemas.errors import BadInput, BadJob, Conflict, DmscError, NotFound, Refused
from schemas.gateway_api import CancelJob, ParkJob, ResumeJob, ScaleJob, SubmitJob
from schemas.job import JobRecord, JobState
from schemas.registry import ServiceRecord
from schemas.services.model_service import (
    DeployVersion,
    ModelService,
    OrderService,
    ServedVersion,
    ServiceList,
    ServiceQuery,
)

log = get_logger("orchestrator")


@dataclass(frozen=True, kw_only=True)
class ModelServicesTimes:
    """Pauses, in seconds."""

    retry_s: float = 0.2
    """Before a failed write is repeated, without a limit: the disk of the bus may be full."""
    look_s: float = 0.1
    """Between two looks at versions: what happens meanwhile is looked at once."""


class ModelServices:
    """`services`: the records, by name. Only the leader writes them."""

    def __init__(
        self, term: TermContext, jobs: JobRuns, times: ModelServicesTimes = ModelServicesTimes()
    ) -> None:
        self._times = times
        self.services: dict[str, ModelService] = {}
        self._term = term
        self._jobs = jobs
        self._owned: dict[str, OwnedRecord] = {}
        self._turn = asyncio.Lock()  # of deployments
        self._writing = asyncio.Lock()

    async def resume(self) -> None:
        """Reads the records that earlier leaders left, and enters versions whose deployment one began."""
        bucket = self._term.bus.bucket(subjects.MODEL_SERVICE)
        for entry in await insistently(partial(bucket.entries, strict=True)):
            service = entry.message
            assert isinstance(service, ModelService)
            self.services[service.service] = service
            self._owned[service.service] = self._owner(service.service, entry.revision)
        known = {version.job for service in self.services.values() for version in service.versions}
        for record in self._jobs.records():
            if record.spec.serve is not None and record.job not in known and record.job in self._jobs.running:
                await self._enter(record, "")

    async def run(self) -> None:
        """Keeps records true while jobs and instances come and go."""
        mesh = self._term.mesh
        guard = await insistently(partial(self._term.bus.bucket(subjects.MODEL_SERVICE).guard, self._mend))
        try:
            while True:
                seen = mesh.changes
                for name in list(self.services):
                    try:
                        await self._change(name, self._look)
                    except DmscError as error:
                        log.error("service not looked after", service=name, reason=error.text)
                await asyncio.sleep(self._times.look_s)
                await mesh.until_changed(seen)
        finally:
            await guard.stop(drain=False)

    async def _mend(self, service: str, revision: int) -> None:
        """Writes a record again that can't be read, from memory."""
        if (owned := self._owned.get(service)) is None:
            await self._term.bus.bucket(subjects.MODEL_SERVICE).put_back(service, revision)
        else:
            await owned.write(lambda: self.services[service])

    # --- requests ---------------------------------------------------------------------------------------
    async def deploy(self, message: DeployVersion, envelope: Envelope) -> ModelService:
        """Has a version run; a command that comes again, through another gateway or leader, is the same one.

        Raises:
            BadJob: the file does not say what it serves.
            Refused: the service is another user's.
            Conflict: the service has a version of this name.
            OverQuota, NotFound: see `JobRuns.submit`.
        """
        serve = message.spec.serve
        if serve is None:
            raise BadJob("serve: is missing: it names the service and its version")
        command = envelope.causation or envelope.id
        async with self._turn:
            service = self.services.get(serve.service)
            if service is not None:
                if service.user != message.user and not message.over_others:
                    raise Refused(f"service {serve.service} is {service.user}'s", user=message.user)
                known = service.version(serve.version)
                job = None if known is None else self._jobs.record(known.job)
                if job is not None and (job.user, job.command) == (message.user, command):
                    return service
                service_rules.check_new(service, serve.version)  # before anything is started
            submission = SubmitJob(
                spec=message.spec,
                user=message.user,
                gateway=message.gateway,
                caller_span=message.caller_span,
                quota=message.quota,
                may_read=message.may_read,
            )
            record = await self._jobs.submit(submission, envelope)
            return await self._enter(record, message.tenant)

    async def order(self, message: OrderService, envelope: Envelope) -> ModelService:
        """Changes a service; see `service_rules`."""
        service = self._known(message.service)
        if message.action in ("scale", "wake"):
            await (self._scale if message.action == "scale" else self._wake)(service, message, envelope)
            return await self._change(message.service, self._look)
        if message.action != "stop":
            change = partial(service_rules.ordered, order=message, now=time.time())
            return await self._change(message.service, change)
        before = {each.job for each in service.versions if each.state not in OVER}
        change = partial(service_rules.retired, order=message, now=time.time())
        after = await self._change(message.service, change)
        reason = f"service {message.service}: stopped by {message.user}"
        for version in after.versions:
            if version.job in before and version.state in OVER and version.job in self._jobs.running:
                cancel = CancelJob(job=version.job, user=message.user, reason=reason)
                await self._jobs.cancel(cancel, envelope)
        return after

    async def change_traffic(self, action: ServiceAction, by: str, why: str) -> ModelService:
        """Carries out an adopted suggestion. `by`: whose it is.

        Raises:
            NotFound: there is no such service or version.
            BadInput, Conflict: see `service_rules.suggested`.
        """
        service = self._known(action.service)
        change = partial(service_rules.suggested, action=action, by=by, why=why, now=time.time())
        return await self._change(service.service, change)

    async def query(self, message: ServiceQuery, envelope: Envelope) -> ServiceList:
        if message.service is not None:
            return ServiceList(services=(self._known(message.service),))
        return ServiceList(services=tuple(self.services[name] for name in sorted(self.services)))

    def _known(self, name: str) -> ModelService:
        if (found := self.services.get(name)) is None:
            there = ", ".join(sorted(self.services)[:8]) or "none yet: dmsc serve FILE"
            raise NotFound(f"there is no service {name}; there is {there}", service=name)
        return found

    async def _scale(self, service: ModelService, message: OrderService, envelope: Envelope) -> None:
        """Replicas of each stage of a version; with 0 it is parked, and gives its slots back."""
        version = service_rules.named(service, message.version)
        if version.state in OVER:
            raise Conflict(f"version {version.version} is {version.state}: deploy it anew")
        if (replicas := message.replicas) is None:
            raise BadInput("scale: say how many replicas")
        job, user = version.job, message.user
        record = self._jobs.record(job)
        parked = record is not None and (record.state is JobState.PARKED or bool(record.held))
        if not replicas:
            await self._jobs.park(ParkJob(job=job, user=user, reason=message.why or "no replicas"), envelope)
        elif parked:
            resume = ResumeJob(job=job, user=user, replicas=replicas, quota=message.quota)
            await self._jobs.unpark(resume, envelope)
        else:
            scale = ScaleJob(job=job, user=user, replicas=replicas, quota=message.quota)
            await self._jobs.scale(scale, envelope)

    async def _wake(self, service: ModelService, message: OrderService, envelope: Envelope) -> None:
        """A request waits for a version that gave its slots back: it starts as soon as there is room.

        One that failed to start tries again.
        """
        version = service_rules.named(service, message.version)
        record = self._jobs.record(version.job)
        if record is None or version.state in OVER:
            return
        if record.dormant or (record.state is JobState.PARKED and not record.held):
            await self._jobs.unpark(ResumeJob(job=version.job, user=message.user), envelope)

    # --- records ----------------------------------------------------------------------------------------
    async def _enter(self, record: JobRecord, tenant: str) -> ModelService:
        """Enters a job as a version of the service that its file names."""
        serve = record.spec.serve
        assert serve is not None
        version, name = _served(record, self._digest_of(record)), serve.service
        if name not in self.services:
            service = ModelService(
                service=name, user=record.user, tenant=tenant, versions=(version,), created_at=time.time()
            )
            owned = self._owner(name, 0)
            await owned.write(lambda: service)
            self.services[name], self._owned[name] = service, owned
            return service

        def change(service: ModelService) -> ModelService:
            if any(each.job == record.job for each in service.versions):
                return service
            return service_rules.with_version(service, version)

        return await self._change(name, change)

    def _digest_of(self, record: JobRecord) -> str:
        """The digest of its weights, where a job of this mesh made them."""
        url = record.spec.weights_url
        made = (each.weights for each in self._jobs.records() if each.weights is not None)
        return next((weights.sha256 for weights in made if weights.url == url), "")

    def _look(self, service: ModelService) -> ModelService:
        """The service with the present states of its versions."""
        jobs = {each.job for each in service.versions if each.state not in OVER}
        registered: Mapping[str, list[ServiceRecord]] = {job: [] for job in jobs}
        if jobs:
            for record in self._term.mesh.records.values():
                if record.job in jobs:
                    registered[record.job].append(record)
        now, versions = time.time(), []
        for version in service.versions:
            found = observed(version, self._jobs.record(version.job), registered.get(version.job, ()))
            if found.state is not version.state:
                log.info(
                    "version",
                    service=service.service,
                    version=version.version,
                    state=str(found.state),
                    reason=found.reason,
                )
                found = found.model_copy(update={"since": now})
            versions.append(found)
        if tuple(versions) == service.versions:
            return service
        return service_rules.settled(service.model_copy(update={"versions": tuple(versions)}), now)

    async def _change(self, name: str, change: Callable[[ModelService], ModelService]) -> ModelService:
        """Writes what `change` makes of the record; nothing is written if that is the same.

        Raises:
            Fenced: another orchestrator leads.
        """
        owned = self._owned[name]
        async with self._writing:
            before = self.services[name]
            after = change(before)
            if after == before:
                return before
            after = after.model_copy(update={"revision": before.revision + 1})
            await owned.write(lambda: after)
            self.services[name] = after
            return after

    def _owner(self, name: str, revision: int) -> OwnedRecord:
        bus, confirmed = self._term.bus, self._term.candidate.confirmed

        def is_ours(entry: KeyValueEntry) -> bool:
            return entry.envelope.sender.incarnation == bus.sender.incarnation

        bucket = bus.bucket(subjects.MODEL_SERVICE)
        return OwnedRecord(bucket, {"service": name}, revision, is_ours, confirmed, self._times.retry_s)


def _served(record: JobRecord, sha256: str = "") -> ServedVersion:
    """A version that begins, by its job's record."""
    spec = record.spec
    assert spec.serve is not None
    return ServedVersion(
        version=spec.serve.version,
        job=record.job,
        weights=spec.weights_url or "",
        sha256=sha256 or ("" if spec.initial_weights is None else spec.initial_weights.expected_sha256),
        stages=spec.parallel.stages,
        worse_nll=spec.serve.worse_nll,
        since=record.submitted_at,
    )
