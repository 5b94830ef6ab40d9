"""Operations on functional modules (draft §4.2, Figure 2): observations, queries, orders, active versions.

An owner may send observations about their own job; observations about all jobs, and every order, need an
operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bus import subjects
from bus.connection import Bus
from entities.gateway.operations.access_client import Bearer
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.operation import Operation
from schemas.automation import Automation, AutomationQuery, AutomationStatus, SwitchAutomation
from schemas.changes import JobObjective
from schemas.errors import Ack, BadInput, NoResponders, NotFound
from schemas.learnt_state import DirectLearnt, LearntBody, LearntStates
from schemas.module_status import (
    ACTIVE,
    ModuleAnswer,
    ModuleList,
    ModuleQuery,
    ModuleQuestion,
    OrderBody,
    QuestionBody,
    version_token,
)
from schemas.observation import Observation
from schemas.policy import DirectModule, ModuleLifecycle, PolicySwitch, PromoteModule, RollBackModule
from schemas.signals import AccessDecision

ALL_JOBS = "jobs"
"""The resource of an observation that concerns no job in particular."""


@dataclass(frozen=True, kw_only=True)
class ModuleTimes:
    """Deadlines, in seconds."""

    order_s: float = (
        8.0  # one order, through the orchestrator: longer than a failover and the module's answer
    )
    answer_s: float = 10.0  # a module's computation of an answer: as long as its own timeout
    version_s: float = 15.0  # one switch of versions: longer than a failover and two orders


class ModuleOperations:
    """Lists modules, orders and queries them, switches versions, and publishes observations for them."""

    def __init__(self, bus: Bus, backends: Backends, times: ModuleTimes = ModuleTimes()) -> None:
        self._bus = bus
        self._backends = backends
        self._times = times

    def modules(self) -> Operation[ModuleList]:
        """The modules that run, with their state and counts."""
        return self._backends.operation(
            "mesh.read", "policies", subjects.MODULE_QUERY, lambda _: ModuleQuery(), self._times.order_s
        )

    def automation(self, job: str | None) -> Operation[AutomationStatus]:
        """How far the mesh, or a job, is changed by itself; of a job also who holds its knobs."""
        action, resource = ("mesh.read", "automation") if job is None else ("job.read", job)
        return self._backends.operation(
            action,
            resource,
            subjects.AUTOMATION_QUERY,
            lambda _: AutomationQuery(job=job),
            self._times.order_s,
        )

    def automate(
        self,
        job: str | None,
        mode: Automation | None,
        objective: JobObjective | None = None,
        budget: Mapping[JobObjective, float | None] = {},
    ) -> Operation[AutomationStatus]:
        """Switches the mesh's mode, or of a job the mode, the objective and limits of its budget.

        Raises:
            BadInput: the mesh would get an objective or a budget.
        """
        if job is None and (objective is not None or budget):
            raise BadInput("an objective and a budget are a job's: name one (job)")

        def message(access: AccessDecision) -> SwitchAutomation:
            return SwitchAutomation(
                mode=mode, job=job, objective=objective, budget=dict(budget), user=access.user
            )

        action, resource = ("mesh.change", "automation") if job is None else ("job.change", job)
        return self._backends.operation(
            action, resource, subjects.SWITCH_AUTOMATION, message, self._times.order_s
        )

    def learnt(self, module: str, version: str | None) -> Operation[LearntStates]:
        """What a module has learnt, as it is kept."""

        def message(access: AccessDecision) -> DirectLearnt:
            return DirectLearnt(module=module, version=version, user=access.user)

        return self._backends.operation(
            "policy.ask", module, subjects.DIRECT_LEARNT, message, self._times.order_s
        )

    def replace_learnt(self, module: str, body: LearntBody) -> Operation[LearntStates]:
        """Replaces what a module has learnt, by nothing or by a trained state."""

        def message(access: AccessDecision) -> DirectLearnt:
            return DirectLearnt(
                module=module,
                version=body.version,
                reset=body.data is None,
                data=body.data,
                schema_version=body.schema_version,
                reason=body.reason,
                user=access.user,
            )

        return self._backends.operation(
            "policy.write", module, subjects.DIRECT_LEARNT, message, self._times.order_s
        )

    def order(self, module: str, body: OrderBody) -> Operation[ModuleLifecycle]:
        def message(access: AccessDecision) -> DirectModule:
            return DirectModule(
                module=module,
                version=body.version,
                op=body.op,
                jobs=body.jobs,
                reason=body.reason,
                user=access.user,
            )

        return self._backends.operation(
            "policy.write", module, subjects.DIRECT_MODULE, message, self._times.order_s
        )

    def promote(self, module: str, version: str, reason: str) -> Operation[PolicySwitch]:
        def message(access: AccessDecision) -> PromoteModule:
            return PromoteModule(module=module, version=version, reason=reason, user=access.user)

        return self._backends.operation(
            "policy.promote", module, subjects.PROMOTE_MODULE, message, self._times.version_s
        )

    def roll_back(self, module: str, reason: str) -> Operation[PolicySwitch]:
        def message(access: AccessDecision) -> RollBackModule:
            return RollBackModule(module=module, reason=reason, user=access.user)

        return self._backends.operation(
            "policy.rollback", module, subjects.ROLL_BACK_MODULE, message, self._times.version_s
        )

    def ask(self, module: str, body: QuestionBody) -> Operation[ModuleAnswer]:
        """The module's suggestion for this job at this moment. Raises `NotFound` if no such module runs."""
        version = ACTIVE if body.version is None else version_token(body.version)
        question = ModuleQuestion(job=body.job, inputs=body.inputs)

        async def act(_: AccessDecision) -> ModuleAnswer:
            try:
                return await self._backends.request(
                    subjects.MODULE_QUESTION,
                    question,
                    timeout_s=self._times.answer_s,
                    module=module,
                    version=version,
                )
            except NoResponders:
                which = "is active" if body.version is None else f"of version {body.version} runs"
                raise NotFound(f"no module {module} {which}: `dmsc policy list` shows which do") from None

        return Operation("policy.ask", module, act)

    def observe(self, bearer: Bearer, observations: Sequence[Observation]) -> Operation[Ack]:
        """Publishes the observations for the modules, in order; none of them if one is not permitted."""

        async def act(access: AccessDecision) -> Ack:
            for job in dict.fromkeys(observation.job or ALL_JOBS for observation in observations):
                await bearer.check("observation.write", job)
            for observation in observations:
                permitted = observation.model_copy(update={"user": access.user})
                await self._bus.publish(subjects.OBSERVATION, permitted, source=observation.source)
            return Ack(note=f"{len(observations)} taken")

        first = next((observation.job for observation in observations if observation.job), ALL_JOBS)
        return Operation("observation.write", first, act)
