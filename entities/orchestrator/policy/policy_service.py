"""Functional modules at the orchestrator: their suggestions are judged, carried out, answered, and lapse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import TaskSet
from entities.metrics import MODULE_DRIFT, MetricReading
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy import arbitration_state as in_force
from entities.orchestrator.policy import module_reputation, personal_pins
from entities.orchestrator.policy.arbitration import (
    ArbitrationConfig,
    Lapse,
    Outcome,
    arbitrate,
    lapse,
    register,
)
from entities.orchestrator.policy.arbitration_state import ArbitrationState, withdraw
from entities.orchestrator.policy.carrying_out import ChangesTraffic, carried_out
from entities.orchestrator.policy.job_facts import facts_of, job_facts, served_facts
from entities.orchestrator.policy.knobs import in_words, set_by_operator
from entities.orchestrator.policy.module_reputation import Key, ModuleReputation
from entities.orchestrator.policy.reputation_store import ReputationStore
from entities.orchestrator.queue.job_queue import JobQueue
from schemas import names
from schemas.actions import QUEUE_ORDER, Recut, ServiceAction, SetQueueOrder
from schemas.automation import OPERATOR, OWN_LOOP, Knob
from schemas.envelope import Envelope
from schemas.errors import Ack, BadMessage, Conflict, DmscError
from schemas.module_status import ModuleList, ModuleQuery
from schemas.policy import (
    DirectModule,
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

    `runs`: the running jobs by id; `queue`: where others wait; `confirmed` returns while this orchestrator
    leads; `services`: whose traffic modules may change.
    """

    def __init__(
        self,
        bus: Bus,
        runs: Mapping[str, JobRun],
        mesh: MeshView,
        queue: JobQueue,
        confirmed: Callable[[], Awaitable[None]],
        config: ArbitrationConfig,
        services: ChangesTraffic | None = None,
        times: PolicyTimes = PolicyTimes(),
    ) -> None:
        self._services = services
        self._times = times
        self._alive = mesh.runs
        self._mesh = mesh
        self._queue = queue
        self._bus = bus
        self._runs = runs
        self._confirmed = confirmed
        self._config = config
        self._state = ArbitrationState()
        self._records = ReputationStore(bus)
        self._revising = asyncio.Lock()
        self._keeping = asyncio.Lock()
        self._looks = TaskSet()
        self._looking: set[tuple[str, Key]] = set()  # jobs and modules whose re-cut is being looked at
        self._recalled: set[str] = set()  # jobs whose pins were read from their records

    async def load(self) -> None:
        """Reads the orders to modules and their reputations, as earlier orchestrators left them."""
        self._state = replace(self._state, modules=await self._records.load())

    def forget(self, job: str) -> None:
        """Forgets a job that has ended."""
        self._recalled.discard(job)
        self._state = in_force.forget_job(self._state, job)

    def end(self, job: str) -> None:
        """Ends all that was adopted for a job, but for what a person has set."""
        self._state = in_force.end_automation(self._state, job, time.monotonic())

    def set_by_person(self, job: str, knob: str, value: str | None, user: str) -> None:
        """A person has set this knob: no module changes it until a person releases it.

        `value`: None: what it was about is no longer there, and nobody holds it.
        """
        self._recall(job)
        holder = None if value is None else set_by_operator(value, user, time.monotonic())
        self._state = in_force.hold(self._state, job, knob, holder)
        if (run := self._runs.get(job)) is not None:
            personal_pins.pin(run, knob, value, user)

    def _recall(self, job: str) -> None:
        """Takes over what persons had set under the former orchestrator."""
        if job in self._recalled or (run := self._runs.get(job)) is None:
            return
        self._recalled.add(job)
        since_epoch = time.time() - time.monotonic()
        for each in run.job.store.record.pins:
            holder = set_by_operator(each.value, each.by, each.at - since_epoch)
            self._state = in_force.hold(self._state, job, each.knob, holder)

    def release(self, job: str) -> None:
        """Releases what persons have set."""
        self._recall(job)
        if (run := self._runs.get(job)) is not None:
            personal_pins.unpin(run)
        for knob, holder in in_force.knobs(self._state, job).items():
            if holder.module == OPERATOR:
                self._state = in_force.hold(self._state, job, knob, None)

    def knobs(self, job: str) -> tuple[Knob, ...]:
        """Who holds which knob of a job, by name."""
        self._recall(job)
        now = time.monotonic()
        return tuple(in_words(name, holder, now) for name, holder in in_force.knobs(self._state, job).items())

    # --- lifecycle ------------------------------------------------------------------------------------
    async def lifecycle(self, message: ModuleLifecycle, envelope: Envelope) -> Ack:
        """A module reports its state.

        Raises:
            Conflict: another process of the same version runs, or the name is taken.
        """
        if message.module in (OWN_LOOP, OPERATOR):
            raise Conflict(f"{message.module} is no name for a module: give it another one")
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

    def readings(self) -> Iterator[MetricReading]:
        """Whether what running modules learnt no longer fits what happens."""
        for (module, version), standing in sorted(self._state.modules.items()):
            if standing.sid is not None:
                yield MODULE_DRIFT(int(bool(standing.drift)), module=module, version=version)

    async def query(self, message: ModuleQuery, envelope: Envelope) -> ModuleList:
        """The status of all known modules, by name and version."""
        statuses = module_reputation.statuses(self._state.modules, self._alive, time.monotonic())
        return ModuleList(modules=statuses)

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

    # --- faults at hand -------------------------------------------------------------------------------
    def answerers(self, job: str, user: str) -> dict[Key, ModuleReputation]:
        """The modules that say what to do about this job's faults, active or in shadow."""
        state = self._state
        may = module_reputation.answerers(state.modules, state.promoted, job, user, time.monotonic())
        return {key: standing for key, standing in may.items() if standing.sid and self._alive(standing.sid)}

    def answered(self, key: Key, *, adopted: bool, nonsense: str = "") -> None:
        """Counts an answer about a fault that was waited for like a suggestion."""
        standing = self._state.modules.get(key)
        if standing is not None:
            standing = replace(standing, suggestions=standing.suggestions + 1)
            self._judged_answer(key, standing, adopted=adopted, nonsense=nonsense)

    def unasked(self, key: Key, sid: str, nonsense: str) -> bool:
        """Counts an answer that nobody waited for against the rate; False: it is of a flood, not answered."""
        known = self._state.modules.get(key)
        if known is None or known.sid not in (None, sid):
            key = module_reputation.STRANGERS
        before = self._state.modules.get(key, ModuleReputation())
        standing, within = module_reputation.heard(before, time.monotonic(), self._config.standing)
        self._judged_answer(key, standing, adopted=False, nonsense=nonsense if within else "")
        return within or standing.over_rate == 1

    def _judged_answer(self, key: Key, standing: ModuleReputation, *, adopted: bool, nonsense: str) -> None:
        now, limits = time.monotonic(), self._config.standing
        standing = module_reputation.judged(standing, adopted=adopted, nonsense=bool(nonsense), lagging=False)
        why = module_reputation.suspension(standing, limits, nonsense=nonsense)
        if why and now >= standing.suspended_until and key != module_reputation.STRANGERS:
            standing = module_reputation.suspend(standing, why, now, limits)
            log.warning("module suspended", module=key[0], reason=why)
        self._state = replace(self._state, modules={**self._state.modules, key: standing})

    # --- suggestions ----------------------------------------------------------------------------------
    async def suggestion(self, message: PolicySuggestion, envelope: Envelope) -> None:
        """Adopts or declines a suggestion, carries it out, and answers the module with the reason."""
        await self._confirmed()
        asked = (message.job, (message.module, message.version))
        if asked in self._looking or not self._wants_look(message, sid=envelope.sender.name):
            await self._judge(message, envelope)
            return
        self._looking.add(asked)  # of each module one: the next one is judged without a look
        self._looks.create(self._looked_at(message, envelope, asked), name=f"look at {message.job}")

    async def _looked_at(self, message: PolicySuggestion, envelope: Envelope, asked: tuple[str, Key]) -> None:
        """Judges a suggested re-cut after a look at it, which takes long; others are judged meanwhile."""
        try:
            await self._look(message, sid=envelope.sender.name)
            await self._judge(message, envelope)
        except DmscError as error:
            log.warning("suggestion not judged", module=message.module, reason=error.text)
        except Exception as error:  # one job's trouble must not end the orchestrator
            log.error("suggestion not judged", module=message.module, job=message.job, exc_info=error)
        finally:
            self._looking.discard(asked)

    async def _judge(self, message: PolicySuggestion, envelope: Envelope) -> None:
        outcome, revision = await self._judged(message, sid=envelope.sender.name)
        if outcome.suspended:
            log.warning("module suspended", module=message.module, reason=outcome.reason)
        if outcome.answer:
            await self._answer(message, outcome, revision, envelope)

    def unusable(self, subject: str, error: BadMessage) -> None:
        """Counts a suggestion that can't be read against the module whose subject it came on."""
        if (named := subjects.SUGGESTION.matches(subject)) is not None:
            before, now, limits = self._state.modules, time.monotonic(), self._config.standing
            modules = module_reputation.unreadable(before, error.text, now, limits, **named)
            self._state = replace(self._state, modules=modules)
            for key, standing in modules.items():
                if standing.suspended_until > now >= before[key].suspended_until:
                    log.warning("module suspended", module=key[0], reason=standing.suspended_for)

    async def consider(self, message: PolicySuggestion) -> Outcome:
        """Judges a suggestion of the orchestrator's own loop like any module's, and carries it out."""
        await self._confirmed()
        await self._look(message, own=True)
        outcome, revision = await self._judged(message, own=True)
        await self._answer(message, outcome, revision)
        return outcome

    async def _judged(
        self, message: PolicySuggestion, *, sid: str | None = None, own: bool = False
    ) -> tuple[Outcome, int | None]:
        """The outcome of a suggestion that was carried out, and the revision of the policy that says so."""
        async with self._revising:
            self._recall(message.job)
            run, before, revision = self._runs.get(message.job), self._state, None
            waiting = self._queue.waiting if isinstance(message.action, SetQueueOrder) else None
            facts = None if run is None else job_facts(run, self._mesh, waiting)
            if run is not None and isinstance(message.action, ServiceAction) and self._services is not None:
                facts = served_facts(run, self._mesh, self._services.services)
            outcome, self._state = arbitrate(
                before, message, facts, time.monotonic(), sid=sid, config=self._config, own=own
            )
            wanted = None if outcome.adopted else outcome.passed_on
            if (
                run is not None and wanted is not None and not isinstance(wanted, ServiceAction)
            ):  # only judged
                why = run.actions.objection(wanted)
                outcome = replace(outcome, reason=why or outcome.reason)
            if outcome.adopted and run is not None:
                state, queue, services = self._state, self._queue, self._services
                outcome, revision = await carried_out(run, message, outcome, state, queue, services)
                if not outcome.adopted:
                    self._state = in_force.not_carried_out(self._state, message, before)
                else:
                    text = f"{message.module} {message.version}: {outcome.reason}"
                    await run.job.store.tell("policy", text=text)
        return outcome, revision

    def _wants_look(self, message: PolicySuggestion, *, sid: str | None = None, own: bool = False) -> bool:
        """Whether arbitration would pass on a re-cut, so that the job has to look at it first."""
        run = self._runs.get(message.job)
        if run is None or not isinstance(message.action, Recut):
            return False
        self._recall(message.job)
        facts, now = job_facts(run, self._mesh), time.monotonic()
        outcome, _ = arbitrate(self._state, message, facts, now, sid=sid, config=self._config, own=own)
        return outcome.passed_on is not None

    async def _look(self, message: PolicySuggestion, *, sid: str | None = None, own: bool = False) -> None:
        if self._wants_look(message, sid=sid, own=own) and (run := self._runs.get(message.job)) is not None:
            await run.actions.look(message.action)

    async def _answer(
        self,
        message: PolicySuggestion,
        outcome: Outcome,
        revision: int | None,
        cause: Envelope | None = None,
    ) -> None:
        decision = PolicyDecision(
            module=message.module,
            version=message.version,
            job=message.job,
            suggestion="" if cause is None else cause.id,
            adopted=outcome.adopted,
            reason=outcome.reason,
            policy_revision=revision,
            suggested=message if cause is None else None,
        )
        await self._bus.publish(subjects.POLICY_DECISION, decision, cause=cause, module=message.module)

    async def lapses(self) -> None:
        """Takes back adopted suggestions whose validity has ended, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._times.look_every_s)
                await self._confirmed()
                await self._lapsed()
        finally:
            await self._looks.close()

    async def _lapsed(self) -> None:
        async with self._revising:
            for job, running in self._runs.items():
                self._note_freed(job, running)
            now = time.monotonic()
            expired = in_force.expired_jobs(self._state, now) & self._runs.keys()
            facts = facts_of({job: self._runs[job] for job in expired}, self._mesh)
            lapses, self._state = lapse(self._state, facts, now)
            for ended in lapses:
                await self._take_back(ended)

    def _note_freed(self, job: str, run: JobRun) -> None:
        """Notes which knobs of a job nobody holds any more."""
        try:
            for knob, by in run.actions.freed():
                self._state = in_force.free(self._state, job, knob, by, time.monotonic())
            for knob in personal_pins.homeless(run):
                self.set_by_person(job, knob, None, "")
        except Exception as error:  # one job's trouble must not end the orchestrator
            log.error("knobs not freed", job=job, exc_info=error)

    async def _take_back(self, ended: Lapse) -> None:
        """Undoes what has lapsed, and tells the job."""
        if ended.knob == QUEUE_ORDER:
            self._queue.suggest_order(())
            log.info("order of the queue lapsed", reason=ended.reason)
            return
        run = self._runs.get(ended.job)
        if run is None:
            return
        try:
            if ended.stage is None:
                run.actions.release(ended.knob)
            else:
                for knob, by in ended.routes:
                    run.actions.unrouted(knob, by)
                run.job.policies.revise(ended.reason, weights=(ended.stage, ended.weights))
                backups = in_force.backups(self._state, ended.job)
                run.training.standbys.revise(backups)  # former weights don't consider losses since then
            await run.job.store.tell("policy", text=ended.reason)
        except DmscError as error:
            log.warning("lapse not carried out", job=ended.job, reason=str(error))
        except Exception as error:  # one job's trouble must not end the orchestrator
            log.error("lapse not carried out", job=ended.job, exc_info=error)
