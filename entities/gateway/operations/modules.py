"""Operations on functional modules (draft §4.2, Figure 2): observations, queries, orders, active versions.

Each is checked by Type 3 at the AAM first. An owner may send observations about their own job; observations
about all jobs, and every order, need an operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from bus import subjects
from bus.connection import Bus
from entities.gateway.operations.access_client import AccessClient, Bearer
from entities.gateway.operations.backends import Backends
from schemas.errors import Ack, NoResponders, NotFound
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

DEADLINE_S = 8.0
"""One order to a module, through the orchestrator: longer than a failover and the module's own answer."""

ANSWER_S = 10.0
"""How long a module may compute an answer: as long as its own timeout."""

ALL_JOBS = "jobs"
"""The resource of an observation that concerns no job in particular."""


class ModuleOperations:
    """Lists modules, orders and queries them, and publishes observations for them."""

    def __init__(self, bus: Bus, backends: Backends, guard: AccessClient) -> None:
        self._bus = bus
        self._backends = backends
        self._guard = guard

    async def modules(self, bearer: Bearer) -> ModuleList:
        """The modules that run, with their state and counts."""
        await bearer.check("mesh.read", "policies")
        return await self._backends.command(subjects.MODULE_QUERY, ModuleQuery(), deadline_s=DEADLINE_S)

    async def order(self, bearer: Bearer, module: str, body: OrderBody) -> ModuleLifecycle:
        access = await bearer.check("policy.write", module)
        message = DirectModule(
            module=module,
            version=body.version,
            op=body.op,
            jobs=body.jobs,
            reason=body.reason,
            user=access.user,
        )
        return await self._backends.command(subjects.DIRECT_MODULE, message, deadline_s=DEADLINE_S)

    async def ask(self, bearer: Bearer, module: str, body: QuestionBody) -> ModuleAnswer:
        """The module's suggestion for this job at this moment. Raises `NotFound` if no such module runs."""
        await bearer.check("policy.ask", module)
        version = ACTIVE if body.version is None else version_token(body.version)
        question = ModuleQuestion(job=body.job, inputs=body.inputs)
        try:
            answer = await self._backends.request(
                subjects.MODULE_QUESTION, question, timeout_s=ANSWER_S, module=module, version=version
            )
        except NoResponders:
            which = "is active" if body.version is None else f"of version {body.version} runs"
            raise NotFound(f"no module {module} {which}: `dmsc policy list` shows which do") from None
        return answer

    async def observe(self, bearer: Bearer, observations: Sequence[Observation]) -> Ack:
        """Publishes the observations for the modules, in order; none of them if one is not permitted."""
        about = dict.fromkeys(one.job or ALL_JOBS for one in observations)
        users = {job: (await bearer.check("observation.write", job)).user for job in about}
        for one in observations:
            let_in = one.model_copy(update={"user": users[one.job or ALL_JOBS]})
            await self._bus.publish(subjects.OBSERVATION, let_in, source=one.source)
        return Ack(note=f"{len(observations)} taken")


def resource_of(observations: Sequence[Observation]) -> str:
    """The resource by which a batch is checked before its observations are checked singly: its first job."""
    return next((one.job for one in observations if one.job), ALL_JOBS)


VERSION_DEADLINE_S = 15.0
"""One command to the orchestrator, repeated until answered: longer than a failover and two orders."""


class PolicyVersionOperations:
    """Promotes a version of a module, and rolls back to the one before."""

    def __init__(self, backends: Backends, guard: AccessClient) -> None:
        self._backends = backends
        self._guard = guard

    async def promote(self, bearer: Bearer, module: str, version: str, reason: str) -> PolicySwitch:
        access = await bearer.check("policy.promote", module)
        message = PromoteModule(module=module, version=version, reason=reason, user=access.user)
        return await self._backends.command(subjects.PROMOTE_MODULE, message, deadline_s=VERSION_DEADLINE_S)

    async def roll_back(self, bearer: Bearer, module: str, reason: str) -> PolicySwitch:
        access = await bearer.check("policy.rollback", module)
        message = RollBackModule(module=module, reason=reason, user=access.user)
        return await self._backends.command(subjects.ROLL_BACK_MODULE, message, deadline_s=VERSION_DEADLINE_S)
