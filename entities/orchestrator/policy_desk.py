"""Functional modules at the orchestrator: what they suggest is judged, carried out, answered, and lapses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator import module_standing
from entities.orchestrator.arbitration import (
    ArbitrationConfig,
    ArbitrationState,
    JobFacts,
    Outcome,
    arbitrate,
    forget_job,
    lapse,
    register,
)
from entities.orchestrator.job_run import JobRun
from schemas.envelope import Envelope
from schemas.errors import Ack, Conflict, DmscError
from schemas.policy import (
    DirectModule,
    ModuleLifecycle,
    ModuleOp,
    ModuleOrder,
    PolicyDecision,
    PolicySuggestion,
)

log = get_logger("orchestrator")

LAPSE_EVERY_S = 1.0
"""How often adopted suggestions are checked for having lapsed."""

ORDER_DEADLINE_S = 5.0
"""A module that is there answers an order within milliseconds, whatever its policy computes."""


class PolicyDesk:
    """One term's. `runs`: the running jobs by id; `confirmed` returns while this orchestrator leads."""

    def __init__(
        self,
        bus: Bus,
        runs: Mapping[str, JobRun],
        confirmed: Callable[[], Awaitable[None]],
        config: ArbitrationConfig,
    ) -> None:
        self._bus = bus
        self._runs = runs
        self._confirmed = confirmed
        self._config = config
        self._state = ArbitrationState()
        self._revising = asyncio.Lock()

    def forget(self, job: str) -> None:
        """It has ended."""
        self._state = forget_job(self._state, job)

    async def lifecycle(self, message: ModuleLifecycle, envelope: Envelope) -> Ack:
        self._state = register(self._state, message, time.monotonic())
        return Ack()

    async def direct(self, message: DirectModule, envelope: Envelope) -> ModuleLifecycle:
        """An operator's order, passed on to the module."""
        reason = message.reason or f"ordered by {message.user}"
        return await self.order(message.module, message.version, message.op, message.jobs, reason)

    async def order(
        self, module: str, version: str | None, op: ModuleOp, jobs: tuple[str, ...] = (), reason: str = ""
    ) -> ModuleLifecycle:
        """Has a running module do that; returns its lifecycle as it then is. Repeating it changes nothing.

        Raises:
            NotFound: no such module runs.
            BadInput: several versions run and `version` is None; or enable, disable without a job.
            Conflict: the module can't.
            Unavailable: it does not answer.
        """
        (_, version), standing = module_standing.running(self._state.modules, module, version)
        order = ModuleOrder(op=op, jobs=jobs, reason=reason)
        answer = await self._bus.command(
            subjects.MODULE_ORDER, order, deadline_s=ORDER_DEADLINE_S, sid=standing.sid
        )
        assert isinstance(answer, ModuleLifecycle)
        self._state = register(self._state, answer, time.monotonic())
        log.info("module ordered", module=module, version=version, op=op, jobs=jobs, reason=reason)
        return answer

    async def suggestion(self, message: PolicySuggestion, envelope: Envelope) -> None:
        """Adopted or declined: the module is told which, and why."""
        await self._confirmed()
        async with self._revising:
            run = self._runs.get(message.job)
            facts = _facts(run) if run is not None else None
            outcome, self._state = arbitrate(
                self._state, message, facts, time.monotonic(), config=self._config
            )
            revision = None
            if outcome.adopted and run is not None:
                outcome, revision = _carry_out(run, message, outcome)
                if outcome.adopted:
                    text = f"{message.module} {message.version}: {outcome.reason}"
                    await run.journal.tell("policy", text=text)
        if outcome.answer:
            decision = PolicyDecision(
                module=message.module,
                version=message.version,
                job=message.job,
                suggestion=envelope.id,
                adopted=outcome.adopted,
                reason=outcome.reason,
                policy_revision=revision,
            )
            await self._bus.publish(subjects.POLICY_DECISION, decision, cause=envelope, module=message.module)

    async def lapses(self) -> None:
        """Takes back what is no longer valid, until cancelled."""
        while True:
            await asyncio.sleep(LAPSE_EVERY_S)
            await self._confirmed()
            async with self._revising:
                facts = {job: held for job, run in self._runs.items() if (held := _facts(run)) is not None}
                lapses, self._state = lapse(self._state, facts, time.monotonic())
                for one in lapses:
                    run = self._runs.get(one.job)
                    if run is None:
                        continue
                    run.communication.revise(one.reason, weights=(one.stage, one.weights))
                    try:
                        await run.journal.tell("policy", text=one.reason)
                    except DmscError as error:
                        log.warning("lapse not carried out", job=one.job, reason=str(error))


def _carry_out(run: JobRun, suggestion: PolicySuggestion, outcome: Outcome) -> tuple[Outcome, int | None]:
    """What was adopted is done; a move the run may still decline. Returns the revision of new weights."""
    move = outcome.move
    if move is not None:
        try:
            run.move(move.sid, move.stage, suggestion.module, move.forecast)
        except Conflict as error:
            return replace(outcome, adopted=False, reason=error.text), None
    elif outcome.stage is not None and outcome.weights is not None:
        reason = f"{suggestion.module}: {suggestion.reason}"
        return outcome, run.communication.revise(reason, weights=(outcome.stage, outcome.weights))
    return outcome, None


def _facts(run: JobRun) -> JobFacts | None:
    policy = run.communication.policy
    if policy is None or policy.ended or run.instances.graph is None:
        return None
    return JobFacts(
        active={
            stage: [member.sid for member in members if member not in run.instances.lost]
            for stage, members in enumerate(run.instances.stages())
        },
        weights=run.communication.weights(),
        revision=policy.revision,
        step=run.step,
    )
