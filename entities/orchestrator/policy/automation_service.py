"""How far the mesh, and each job, is changed without a person, and for what; switched live (ADR-0092).

The lower one of the mesh's and the job's mode holds. The mesh's is in the bucket `automation`, a job's in its
record, so that a new orchestrator goes on with both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.policy_service import PolicyService
from schemas.automation import (
    Automation,
    AutomationQuery,
    AutomationStatus,
    BudgetSpec,
    MeshAutomation,
    SwitchAutomation,
    limits_text,
    lower,
)
from schemas.envelope import Envelope
from schemas.errors import NotFound

log = get_logger("orchestrator")

SCOPE = "mesh"
"""The key in the bucket `automation`."""


class AutomationService:
    """Switches automation during one term, and says who holds which knob.

    `desk`: the service that judges suggestions; `started_with`: the mode of this orchestrator's command line,
    which replaces one that an orchestrator with another mode wrote.
    """

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        runs: Mapping[str, JobRun],
        desk: PolicyService,
        started_with: Automation,
    ) -> None:
        self._bucket = bus.bucket(subjects.MESH_AUTOMATION)
        self._mesh = mesh
        self._runs = runs
        self._desk = desk
        self._started_with = started_with

    async def load(self) -> None:
        """Reads the mesh's mode, as earlier orchestrators left it."""
        entry = await self._bucket.get(scope=SCOPE)
        kept = None if entry is None else entry.message
        if isinstance(kept, MeshAutomation) and kept.started_with is self._started_with:
            self._mesh.automation = kept.mode
        elif kept is not None or self._started_with is not Automation.ACT:
            await self._write(self._started_with, "the orchestrator's command line")
        else:
            self._mesh.automation = Automation.ACT

    async def switch(self, message: SwitchAutomation, envelope: Envelope) -> AutomationStatus:
        """Switches the mesh, or one job. Below `act`, what was adopted ends, as if its validity had.

        Objective and budget hold from the next decision on; what was adopted before them stays.

        Raises:
            NotFound: there is no such job.
        """
        jobs = list(self._runs) if message.job is None else [message.job]
        if message.job is not None:
            await self._switch_job(self._run(message.job), message)
        elif message.mode is not None:
            await self._write(message.mode, message.user)
            if message.mode is not Automation.ACT:
                self._desk.end("")  # the order of the queue, which is no job's
        for job in jobs if message.mode is not None else ():
            if (still := self._runs.get(job)) is None:  # it has ended meanwhile
                continue
            if self._holds(still) is not Automation.ACT:
                self._desk.end(job)
            elif message.job is not None:
                self._desk.release(job)  # what a person had set is the mesh's again
        log.info(
            "automation switched",
            mode=message.mode,
            objective=message.objective,
            budget=message.budget,
            job=message.job,
            by=message.user,
        )
        return self._status(message.job)

    async def _switch_job(self, run: JobRun, message: SwitchAutomation) -> None:
        """Records what a person has switched of a job, and tells it in the job's events."""
        store, before = run.job.store, run.job.store.record
        switched: dict[str, object] = {}
        if message.mode is not None:
            switched["automation"] = message.mode
        if message.objective is not None:
            switched["objective"] = message.objective
        if message.budget:
            switched["budget"] = before.budget_in_force.switched(message.budget)
        await store.note(now=True, **switched)
        run.job.queue.again()  # what it may grow to follows from all three
        for name, former, present in (
            ("automation", before.automated, store.record.automated),
            ("objective", before.objective_in_force, store.record.objective_in_force),
            ("budget", _in_words(before.budget_in_force), _in_words(store.record.budget_in_force)),
        ):
            if former != present:
                await store.tell("policy", text=f"{name}: {former} → {present} by {message.user}")

    async def query(self, message: AutomationQuery, envelope: Envelope) -> AutomationStatus:
        """The modes, and with a job who holds its knobs."""
        return self._status(message.job)

    async def _write(self, mode: Automation, by: str) -> None:
        record = MeshAutomation(mode=mode, started_with=self._started_with, by=by, at=time.time())
        await self._bucket.put(record, scope=SCOPE)
        self._mesh.automation = mode

    def _run(self, job: str) -> JobRun:
        if (run := self._runs.get(job)) is None:
            raise NotFound(f"no job {job} runs: `dmsc jobs` lists them")
        return run

    def _holds(self, run: JobRun) -> Automation:
        return lower(self._mesh.automation, run.job.store.record.automated)

    def _status(self, job: str | None) -> AutomationStatus:
        if job is None:
            return AutomationStatus(mesh=self._mesh.automation, holds=self._mesh.automation)
        run = self._run(job)
        record = run.job.store.record
        return AutomationStatus(
            mesh=self._mesh.automation,
            job=job,
            asked=record.automated,
            holds=self._holds(run),
            objective=record.objective_in_force,
            budget=record.budget_in_force.limits(),
            knobs=self._desk.knobs(job),
        )


def _in_words(budget: BudgetSpec) -> str:
    return limits_text(budget.limits()) or "none"
