"""Functional modules at the orchestrator: their suggestions are judged, carried out, answered, and lapse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.policy import module_reputation
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


@dataclass(frozen=True, kw_only=True)
class PolicyTimes:
    """When a term's policies are looked at, in seconds."""

    look_every_s: float = 1.0
    """Pause between checks whether adopted suggestions have lapsed, and whether an order is due again."""
    keep_every_s: float = 10.0
    """Greatest age of the counts that a new orchestrator finds; orders are written at once."""
    order_s: float = 5.0
    """A running module answers an order within milliseconds, whatever its policy computes."""


class PolicyService:
    """Serves functional modules during one term.

    `runs`: the running jobs by id; `alive`: whether the registry knows a module of this SID as running;
    `confirmed` returns while this orchestrator leads.
    """

    def __init__(
        self,
        bus: Bus,
        runs: Mapping[str, JobRun],
        alive: Callable[[str], bool],
        confirmed: Callable[[], Awaitable[None]],
        config: ArbitrationConfig,
        times: PolicyTimes = PolicyTimes(),
    ) -> None:
        self._times = times
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
        """Reads the orders to modules and their reputations, as earlier orchestrators left them."""
        self._state = replace(self._state, modules=await self._records.load())

    def forget(self, job: str) -> None:
        """Forgets a job that has ended."""
        self._state = forget_job(self._state, job)

    # --- lifecycle ------------------------------------------------------------------------------------
    async def lifecycle(self, message: ModuleLifecycle, envelope: Envelope) -> Ack:
        """A module reports its state.

        Raises:
            Conflict: another process of the same version runs.
        """
        known = self._state.modules.get((message.module, message.version))
        if (
            known is not None
            and known.state not in module_reputation.OVER
            and known.sid is not None
            and (known.sid, known.owner) != (message.sid, message.owner)
            and self._alive(known.sid)
        ):
            runs = f"{message.module} {message.version} runs already, as {known.sid}"
            raise Conflict(f"{runs}: give this one another version")
        self._note(message)
        return Ack()

    def standings(self) -> dict[module_reputation.Key, ModuleState]:
        """The state of each version of each module, as the module reports it."""
        modules = self._state.modules.items()
        return {key: reputation.state for key, reputation in modules if reputation.sid is not None}

    def owner_of(self, module: str, version: str) -> str:
        """The owner of this version; of any version of the module, where this one is not known."""
        modules = self._state.modules
        candidates = [modules[module, version]] if (module, version) in modules else []
        candidates += [reputation for (name, _), reputation in modules.items() if name == module]
        return candidates[0].owner if candidates else names.MESH

    def promoted(self, module: str, version: str | None, *, retracted: str | None = None) -> None:
        """Makes this version of a module the active one; suggestions of version `retracted` lapse.

        Without a version, each version is in the state that it reports.
        """
        promoted = module_reputation.promote(self._state.promoted, module, version)
        self._state = replace(self._state, promoted=promoted)
        if retracted is not None:
            self._state = withdraw(self._state, module, retracted, time.monotonic())

    def _note(self, message: ModuleLifecycle) -> None:
        """Takes over a module's state; suggestions that it may not make any more lapse."""
        key, now = (message.module, message.version), time.monotonic()
        known = self._state.modules.get(key, module_reputation.ModuleReputation())
        crashes, suspended = known.crashes, known.suspended_for
        self._state = register(self._state, message, now, self._config.standing)
        gone_quiet = message.state is ModuleState.SHADOW and known.state is ModuleState.ACTIVE
        if gone_quiet and message.module not in self._state.promoted:  # else they stay for the next version
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
        """The status of all known modules, by name and version."""
        now = time.monotonic()
        known = sorted(self._state.modules.items())
        return ModuleList(
            modules=tuple(
                _status(key, reputation, reputation.sid is None or self._alive(reputation.sid), now)
                for key, reputation in known
                if key != module_reputation.STRANGERS
            )
        )

    async def direct(self, message: DirectModule, envelope: Envelope) -> ModuleLifecycle:
        """Passes an operator's order on to the module."""
        reason = message.reason or f"ordered by {message.user}"
        return await self.order(message.module, message.version, message.op, message.jobs, reason)

    async def order(
        self, module: str, version: str | None, op: ModuleOp, jobs: tuple[str, ...] = (), reason: str = ""
    ) -> ModuleLifecycle:
        """Gives an order to a running module; returns its lifecycle afterwards. Orders are idempotent.

        Raises:
            NotFound: no such module runs.
            BadInput: several versions run and `version` is None; or enable or disable names no job.
            Conflict: the module can't carry the order out.
            Unavailable: it does not answer.
        """
        (_, version), standing = module_reputation.running(self._state.modules, module, version)
        order = ModuleOrder(op=op, jobs=jobs, reason=reason)
        answer = await self._bus.command(
            subjects.MODULE_ORDER, order, deadline_s=self._times.order_s, sid=standing.sid
        )
        self._note(answer)
        key = (module, version)
        if key in self._state.modules:
            obeyed = module_reputation.ordered(self._state.modules[key], op, jobs)
            self._state = replace(self._state, modules={**self._state.modules, key: obeyed})
            await self.keep()
        log.info("module ordered", module=module, version=version, op=op, jobs=jobs, reason=reason)
        return answer

    async def orders(self) -> None:
        """Repeats orders to modules that crashed, and saves reputations, until cancelled.

        A module that crashed comes back in the state in which it was started, not in the one that was
        ordered.
        """
        kept_at = time.monotonic()
        while True:
            await asyncio.sleep(self._times.look_every_s)
            await self._confirmed()
            if time.monotonic() - kept_at >= self._times.keep_every_s:
                await self.keep()
                kept_at = time.monotonic()
            for module, version in list(self._state.modules):
                for op, jobs in self._due_orders(module, version):
                    if (op, jobs) not in self._due_orders(module, version):  # another order came meanwhile
                        continue
                    try:
                        await self.order(module, version, op, jobs, "as ordered before it crashed")
                    except DmscError as error:
                        log.warning("order not repeated", module=module, op=op, reason=error.text)

    def _due_orders(self, module: str, version: str) -> list[tuple[ModuleOp, tuple[str, ...]]]:
        standing = self._state.modules.get((module, version))
        return [] if standing is None else list(module_reputation.due_orders(standing))

    async def keep(self) -> None:
        """Saves the reputations of modules for the next orchestrator."""
        try:
            async with self._keeping:  # an older state must not be written over a newer one
                await self._records.keep(self._state.modules)
        except DmscError as error:
            log.warning("standings of modules not kept", reason=error.text)  # and tried again before long

    # --- suggestions ----------------------------------------------------------------------------------
    async def suggestion(self, message: PolicySuggestion, envelope: Envelope) -> None:
        """Adopts or declines a suggestion, carries it out, and answers the module with the reason."""
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
                    await run.job.store.tell("policy", text=text)
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
        """Takes back adopted suggestions whose validity has ended, until cancelled."""
        while True:
            await asyncio.sleep(self._times.look_every_s)
            await self._confirmed()
            async with self._revising:
                pairs = ((job, _facts(run)) for job, run in self._runs.items())
                facts = {job: job_facts for job, job_facts in pairs if job_facts is not None}
                lapses, self._state = lapse(self._state, facts, time.monotonic())
                for ended in lapses:
                    run = self._runs.get(ended.job)
                    if run is None:
                        continue
                    run.job.policies.revise(ended.reason, weights=(ended.stage, ended.weights))
                    run.training.standbys.revise()  # the former weights don't consider losses since then
                    try:
                        await run.job.store.tell("policy", text=ended.reason)
                    except DmscError as error:
                        log.warning("lapse not carried out", job=ended.job, reason=str(error))


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
    """Carries an adopted suggestion out; the run may decline a move. Returns the revision of new weights."""
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
        revision = run.job.policies.revise(reason, weights=(outcome.stage, outcome.weights))
        run.training.standbys.revise()
        return outcome, revision
    return outcome, None


def _facts(run: JobRun) -> JobFacts | None:
    policy = run.job.policies.policy
    if policy is None or policy.ended or run.job.instances.deployed is None:
        return None
    return JobFacts(
        active={
            stage: [member.sid for member in members if member not in run.job.instances.lost]
            for stage, members in enumerate(run.job.instances.stages())
        },
        weights=run.job.policies.weights(),
        revision=policy.revision,
        step=run.step,
        user=run.job.store.record.user,
    )
