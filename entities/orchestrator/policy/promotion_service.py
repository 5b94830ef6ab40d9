"""Versions of modules: promoted by a person, compared by their scores, rolled back (ADR-0021).

The bucket `modules` says which version is active; the scores of a trial are read again from their stream. So
a new orchestrator goes on where the former one was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.policy.promotion_rules import (
    PromotionConfig,
    PromotionTrial,
    disagreeing,
    promote,
    roll_back,
    verdict,
)
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.policy import (
    ModuleOp,
    ModuleRecord,
    ModuleState,
    PolicyScore,
    PolicySwitch,
    PromoteModule,
    RollBackModule,
)

log = get_logger("orchestrator")

MYSELF = "orchestrator"


class PromotionService:
    """Promotes and rolls back versions during one term.

    `desk`: the service that knows the modules and gives them orders; `runs`: the running jobs by id;
    `look_every_s`: pause between comparisons of scores, and between checks of the states of modules.
    """

    def __init__(
        self,
        bus: Bus,
        desk: PolicyService,
        runs: Mapping[str, JobRun],
        confirmed: Callable[[], Awaitable[None]],
        config: PromotionConfig,
        *,
        look_every_s: float = 0.5,
    ) -> None:
        self._look_every_s = look_every_s
        self._bus = bus
        self._desk = desk
        self._runs = runs
        self._confirmed = confirmed
        self._config = config
        self._bucket = bus.bucket(subjects.MODULE_RECORD)
        self._records: dict[str, ModuleRecord] = {}
        self._trials: dict[str, PromotionTrial] = {}
        self._turn = asyncio.Lock()
        """Held by each promotion or roll-back, so that none comes between its reading and its writing."""

    async def load(self) -> None:
        """Reads the promoted versions from the bucket, and their scores since then from the stream."""
        for entry in await self._bucket.entries(strict=True):
            if isinstance(entry.message, ModuleRecord):
                self._keep(entry.message)
        for module, trial in self._trials.items():
            async with aclosing(
                self._bus.history(subjects.POLICY_SCORE, since=trial.since, module=module)
            ) as items:
                async for item in items:
                    if isinstance(item.message, PolicyScore) and self._is_owners(item.message):
                        trial.take(item.message, self._records[module], self._config)

    async def promote(self, message: PromoteModule, envelope: Envelope) -> PolicySwitch:
        """Makes a version of a module the active one.

        Raises:
            NotFound, Conflict: that version can't become active.
        """
        async with self._turn:
            record = promote(
                self._records.get(message.module),
                self._versions(message.module),
                message.module,
                message.version,
                by=message.user,
                reason=message.reason or f"promoted by {message.user}",
                now=time.time(),
            )
            switched = await self._write(record, rollback=False)
        return await self._carry_out(record, rollback=False) if switched else _switch(record, rollback=False)

    async def roll_back(self, message: RollBackModule, envelope: Envelope) -> PolicySwitch:
        """Makes the former version of a module the active one again.

        Raises:
            Conflict: there is no former version.
        """
        return await self._roll_back(
            message.module, message.user, message.reason or f"rolled back by {message.user}"
        )

    async def score(self, message: PolicyScore, envelope: Envelope) -> None:
        """Counts a score, if its module has a version on trial."""
        trial = self._trials.get(message.module)
        if trial is not None and self._is_owners(message):
            trial.take(message, self._records[message.module], self._config)

    def _is_owners(self, score: PolicyScore) -> bool:
        """Whether a score is of this owner's module, and not of another user's module of the same name."""
        return score.owner == self._desk.owner_of(score.module, score.version)

    async def forget(self, module: str) -> None:
        """Forgets a module's promotion: a person has ordered the state of one of its versions."""
        async with self._turn:
            if module in self._records:
                await self._bucket.delete(module=module)  # first: one that fails is repeated
                del self._records[module]
                self._trials.pop(module, None)
                self._desk.promoted(module, None)

    async def run(self) -> None:
        """Compares scores, rolls back, and corrects the states of modules, until cancelled."""
        while True:
            await asyncio.sleep(self._look_every_s)
            await self._confirmed()
            for module in list(self._trials):
                trial, record = self._trials.get(module), self._records.get(module)
                if trial is None or record is None:  # forgotten meanwhile
                    continue
                why = verdict(trial, record, self._config)
                if why:
                    await self._contained(
                        self._roll_back(module, MYSELF, f"{record.active} gives way: {why}"), module
                    )
            for module, version, state in disagreeing(self._records, self._desk.standings()):
                if (module, version, state) in disagreeing(self._records, self._desk.standings()):  # still
                    await self._contained(self._order(module, version, state), module)

    # --- carrying it out ------------------------------------------------------------------------------
    async def _roll_back(self, module: str, by: str, reason: str) -> PolicySwitch:
        async with self._turn:
            record = roll_back(
                self._records.get(module),
                self._versions(module),
                module,
                by=by,
                reason=reason,
                now=time.time(),
            )
            switched = await self._write(record, rollback=True)
        return await self._carry_out(record, rollback=True) if switched else _switch(record, rollback=True)

    async def _write(self, record: ModuleRecord, *, rollback: bool) -> bool:
        """Writes the record, by which the switch takes effect; returns False if the record is the same."""
        if self._records.get(record.module) == record:
            return False
        await self._bucket.put(record, module=record.module)
        self._keep(record, retracted=record.previous if rollback else None)
        return True

    async def _carry_out(self, record: ModuleRecord, *, rollback: bool) -> PolicySwitch:
        """Publishes the switch and orders the modules. It does not hold `_turn`: a module may answer late."""
        switch = _switch(record, rollback=rollback)
        text = f"{record.module} {record.active} is active instead of {record.previous or 'none'}: "
        log.info(
            "module switched",
            module=record.module,
            version=record.active,
            previous=record.previous,
            rollback=rollback,
            reason=record.reason,
        )
        await self._contained(
            self._bus.publish(subjects.POLICY_SWITCH, switch, module=record.module), record.module
        )
        for run in list(self._runs.values()):
            await self._contained(run.job.store.tell("policy", text=text + record.reason), record.module)
        for version, state in ((record.active, ModuleState.ACTIVE), (record.previous, ModuleState.SHADOW)):
            if version and self._records.get(record.module) == record:  # else another switch came meanwhile
                await self._contained(self._order(record.module, version, state), record.module)
        return switch

    def _keep(self, record: ModuleRecord, *, retracted: str | None = None) -> None:
        self._records[record.module] = record
        self._trials.pop(record.module, None)
        if record.trial:
            self._trials[record.module] = PromotionTrial(since=record.since)
        self._desk.promoted(record.module, record.active, retracted=retracted)

    async def _order(self, module: str, version: str, state: ModuleState) -> None:
        if self._desk.standings().get((module, version)) in (None, state):
            return
        op = ModuleOp.ACTIVATE if state is ModuleState.ACTIVE else ModuleOp.SHADOW
        record = self._records.get(module)
        if record is not None:
            await self._desk.order(module, version, op, reason=record.reason)

    async def _contained(self, work: Awaitable[object], module: str) -> None:
        """Logs an error of `work`: a module that does not answer is ordered again later."""
        try:
            await work
        except DmscError as error:
            log.warning("module not switched", module=module, reason=error.text)

    def _versions(self, module: str) -> dict[str, ModuleState]:
        return {version: state for (name, version), state in self._desk.standings().items() if name == module}


def _switch(record: ModuleRecord, *, rollback: bool) -> PolicySwitch:
    return PolicySwitch(
        module=record.module,
        version=record.active,
        previous=record.previous,
        rollback=rollback,
        by=record.by,
        reason=record.reason,
    )
