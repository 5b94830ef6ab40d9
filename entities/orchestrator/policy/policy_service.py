"""Functional modules at the orchestrator: what they suggest is judged, carried out, answered, and lapses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.policy import module_reputation as module_standing
from entities.orchestrator.policy.arbitration import (
    ArbitrationConfig,
    ArbitrationState,
    Outcome,
    arbitrate,
    forget_job,
    lapse,
    not_carried_out,
    register,
    withdraw,
)
from entities.orchestrator.policy.module_reputation import Key, ModuleReputation
from entities.orchestrator.policy.reputation_store import ReputationStore
from entities.orchestrator.policy.suggestion_rules import JobFacts
from schemas import names
from schemas.envelope import Envelope
from schemas.errors import Ack, Conflict, DmscError
from schemas.module_status import ModuleList, ModuleQuery, ModuleStatus
from schemas.policy import (
    DirectModule,
    ExpectFailures,
    ModuleLifecycle,
    ModuleOp,
    ModuleOrder,
    ModuleState,
    PolicyDecision,
    PolicySuggestion,
)

log = get_logger("orchestrator")

LAPSE_EVERY_S = 1.0
"""How often adopted suggestions are checked for having lapsed."""

KEEP_EVERY_S = 10.0
"""How old the counts are at most that a new orchestrator finds; orders are kept at once."""

ORDER_DEADLINE_S = 5.0
"""A module that is there answers an order within milliseconds, whatever its policy computes."""


class PolicyService:
    """One term's.

    `runs`: the running jobs by id; `alive`: whether the registry has a module of this SID running;
    `confirmed` returns while this orchestrator leads.
    """

    def __init__(
        self,
        bus: Bus,
        runs: Mapping[str, JobRun],
        alive: Callable[[str], bool],
        confirmed: Callable[[], Awaitable[None]],
        config: ArbitrationConfig,
    ) -> None:
        self._alive = alive
        self._bus = bus
        self._runs = runs
        self._confirmed = confirmed
        self._config = config
        self._state = ArbitrationState()
        self._records = ReputationStore(bus)
        self._revising = asyncio.Lock()
        self._keeping = asyncio.Lock()

    async def load(self) -> None:
        """What modules were ordered to be, and how they had fared, whoever led before."""
        self._state = replace(self._state, modules=await self._records.load())

    def forget(self, job: str) -> None:
        """It has ended."""
        self._state = forget_job(self._state, job)

    # --- lifecycle ------------------------------------------------------------------------------------
    async def lifecycle(self, message: ModuleLifecycle, envelope: Envelope) -> Ack:
        """What a module says of itself.

        Raises:
            Conflict: another process of the same version runs.
        """
        known = self._state.modules.get((message.module, message.version))
        if (
            known is not None
            and known.state not in module_standing.OVER
            and known.sid is not None
            and (known.sid, known.owner) != (message.sid, message.owner)
            and self._alive(known.sid)
        ):
            runs = f"{message.module} {message.version} runs already, as {known.sid}"
            raise Conflict(f"{runs}: give this one another version")
        self._note(message)
        return Ack()

    def standings(self) -> dict[module_standing.Key, ModuleState]:
        """The state that each version of each module is in, by what it says itself."""
        return {key: one.state for key, one in self._state.modules.items() if one.sid is not None}

    def owner_of(self, module: str, version: str) -> str:
        """Whose this version is, or the module, where that version is not known."""
        found = [
            one for (name, which), one in self._state.modules.items() if (name, which) == (module, version)
        ]
        found += [one for (name, _), one in self._state.modules.items() if name == module]
        return found[0].owner if found else names.MESH

    def promoted(self, module: str, version: str | None, *, retracted: str | None = None) -> None:
        """From here on this version of a module is the active one (None: as they say themselves), and what
        the version `retracted` had adopted lapses."""
        promoted = module_standing.promote(self._state.promoted, module, version)
        self._state = replace(self._state, promoted=promoted)
        if retracted is not None:
            self._state = withdraw(self._state, module, retracted, time.monotonic())

    def _note(self, message: ModuleLifecycle) -> None:
        """Takes the state over; what a module may not wish any more lapses."""
        key, now = (message.module, message.version), time.monotonic()
        known = self._state.modules.get(key, module_standing.ModuleReputation())
        crashes, suspended = known.crashes, known.suspended_for
        self._state = register(self._state, message, now, self._config.standing)
        gone_quiet = message.state is ModuleState.SHADOW and known.state is ModuleState.ACTIVE
        if gone_quiet and message.module not in self._state.promoted:  # else what holds is for the next one
            self._state = withdraw(self._state, *key, now)
        if disabled := set(message.without) - set(known.without):
            self._state = withdraw(self._state, *key, now, disabled)
        standing = self._state.modules.get(key)
        if standing is not None and standing.crashes > crashes:
            log.warning(
                "module crashed", module=message.module, version=message.version, crashes=standing.crashes
            )
            if standing.suspended_for and not suspended:
                log.warning("module suspended", module=message.module, reason=standing.suspended_for)

    async def query(self, message: ModuleQuery, envelope: Envelope) -> ModuleList:
        """Who runs and how it fares, by name and version."""
        now = time.monotonic()
        known = sorted(self._state.modules.items())
        return ModuleList(
            modules=tuple(
                _status(key, one, one.sid is None or self._alive(one.sid), now)
                for key, one in known
                if key != module_standing.STRANGERS
            )
        )

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
        self._note(answer)
        key = (module, version)
        if key in self._state.modules:
            obeyed = module_standing.ordered(self._state.modules[key], op, jobs)
            self._state = replace(self._state, modules={**self._state.modules, key: obeyed})
            await self.keep()
        log.info("module ordered", module=module, version=version, op=op, jobs=jobs, reason=reason)
        return answer

    async def orders(self) -> None:
        """Modules that crash come back as they were started: they become again what they were ordered to be.

        And how they fare is kept for the next orchestrator. Until cancelled.
        """
        kept_at = time.monotonic()
        while True:
            await asyncio.sleep(LAPSE_EVERY_S)
            await self._confirmed()
            if time.monotonic() - kept_at >= KEEP_EVERY_S:
                await self.keep()
                kept_at = time.monotonic()
            for module, version in list(self._state.modules):
                for op, jobs in self._due_orders(module, version):
                    if (op, jobs) not in self._due_orders(module, version):  # ordered otherwise meanwhile
                        continue
                    try:
                        await self.order(module, version, op, jobs, "as ordered before it crashed")
                    except DmscError as error:
                        log.warning("order not repeated", module=module, op=op, reason=error.text)

    def _due_orders(self, module: str, version: str) -> list[tuple[ModuleOp, tuple[str, ...]]]:
        standing = self._state.modules.get((module, version))
        return [] if standing is None else list(module_standing.due_orders(standing))

    async def keep(self) -> None:
        """Leaves how modules stand for the next orchestrator."""
        try:
            async with self._keeping:  # lest an older state be written over a newer one
                await self._records.keep(self._state.modules)
        except DmscError as error:
            log.warning("standings of modules not kept", reason=error.text)  # and tried again before long

    # --- suggestions ----------------------------------------------------------------------------------
    async def suggestion(self, message: PolicySuggestion, envelope: Envelope) -> None:
        """Adopted or declined: the module is told which, and why."""
        await self._confirmed()
        async with self._revising:
            run = self._runs.get(message.job)
            facts = _facts(run) if run is not None else None
            outcome, self._state = arbitrate(
                self._state, message, facts, time.monotonic(), sid=envelope.sender.name, config=self._config
            )
            if outcome.suspended:
                log.warning("module suspended", module=message.module, reason=outcome.reason)
            revision = None
            if outcome.adopted and run is not None:
                outcome, revision = _carry_out(run, message, outcome)
                if not outcome.adopted:
                    self._state = not_carried_out(self._state, message)
                else:
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
                    run.training.revise_standbys()  # the weights of before know nothing of who died since
                    try:
                        await run.journal.tell("policy", text=one.reason)
                    except DmscError as error:
                        log.warning("lapse not carried out", job=one.job, reason=str(error))


def _status(key: Key, standing: ModuleReputation, alive: bool, now: float) -> ModuleStatus:
    left_s = max(0.0, standing.suspended_until - now)
    return ModuleStatus(
        module=key[0],
        version=key[1],
        sid=standing.sid,
        state=ModuleState.SUSPENDED if left_s else standing.state,
        alive=alive,
        jobs=standing.jobs,
        without=standing.without,
        suggestions=standing.suggestions,
        adopted=standing.adopted,
        declined=standing.suggestions - standing.adopted,
        strikes=standing.strikes,
        crashes=standing.crashes,
        suspended_s=round(left_s, 1),
        reason=standing.suspended_for if left_s else standing.said,
    )


def _carry_out(run: JobRun, suggestion: PolicySuggestion, outcome: Outcome) -> tuple[Outcome, int | None]:
    """What was adopted is done; a move the run may still decline. Returns the revision of new weights."""
    move = outcome.passed_on
    if isinstance(move, ExpectFailures):
        run.checkpoints.expect(move.between_s, outcome.valid_s, suggestion.module)
    elif move is not None:
        try:
            run.move(move.sid, move.stage, suggestion.module, move.forecast)
        except Conflict as error:
            return replace(outcome, adopted=False, reason=error.text), None
    elif outcome.stage is not None and outcome.weights is not None:
        reason = f"{suggestion.module}: {suggestion.reason}"
        revision = run.communication.revise(reason, weights=(outcome.stage, outcome.weights))
        run.training.revise_standbys()
        return outcome, revision
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
        user=run.journal.record.user,
    )
