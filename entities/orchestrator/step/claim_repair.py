"""Repair of lost claims (DESIGN §5 rule 11): after a silence, instances are asked what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from bus.subjects import STEP_STATUS
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.transaction.step_events import Event, Stalled
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.errors import DmscError
from schemas.step import Member, MicrobatchClaim, Phase, StepStatus


class ClaimRepair:
    """Watches the claims of the open step. `claimed` gets claims from answers, `post` gets `Stalled`."""

    def __init__(
        self,
        job: JobContext,
        machine: StepMachine,
        claimed: Callable[[MicrobatchClaim], None],
        post: Callable[[Event], None],
    ) -> None:
        self._job = job
        self._times = job.times.steps
        self._machine = machine
        self._claimed = claimed
        self._post = post
        self._progress = asyncio.Event()
        self._ask_now = asyncio.Event()
        self.quiet_s = self._times.quiet_s
        self._now = job.bus.pulse.now
        self._moved_at = self._now()

    def begun(self) -> None:
        """The dispatch of a step begins now."""
        self._moved_at = self._now()

    def heard(self) -> None:
        """A claim arrived."""
        self._progress.set()

    async def reconnected(self) -> None:
        """The bus is back: claims may have been lost, so instances are asked at once."""
        self._ask_now.set()
        self._progress.set()

    def now(self) -> float:
        """A clock in seconds that stands still while the bus is away."""
        return self._now()

    @property
    def patience_s(self) -> float:
        """Patience until the first claim, which needs a whole way through the pipeline: ten times that."""
        return max(self._times.stall_s, 10 * self._job.instances.expected_ms / 1e3)

    async def run(self) -> None:
        """Repairs lost claims; posts `Stalled` if a step makes no progress although the bus is there."""
        with self._job.bus.pulse.held():
            await self._run()

    async def _run(self) -> None:
        self._moved_at = self._now()
        while True:
            self._progress.clear()
            try:
                async with asyncio.timeout(self.quiet_s):
                    await self._progress.wait()
                self._moved_at = self._now()
                if not self._ask_now.is_set():
                    continue
            except TimeoutError:
                pass
            self._ask_now.clear()
            machine = self._machine
            if machine.phase is not Phase.GATHERING or not machine.settled or not machine.ledger.missing():
                self._moved_at = self._now()  # the step waits for orders, which have deadlines of their own
                continue
            count = len(machine.ledger.claims)
            await self.ask(machine.step, [member for members in machine.stages for member in members])
            if len(machine.ledger.claims) > count:
                self._moved_at = self._now()
            times = sorted(claim.forward_ms + claim.backward_ms for claim in machine.ledger.claims.values())
            patience = max(self.patience_s, 0.02 * times[len(times) // 2] if times else 0.0)
            if self._now() - self._moved_at > patience:
                self._moved_at = self._now()
                missing = machine.ledger.missing()[:4]
                self._post(
                    Stalled(f"step {machine.step}: no progress for {patience:.0f} s, missing {missing}")
                )

    async def ask(self, step: int, members: Iterable[Member], *, evaluate: bool = False) -> None:
        """Asks instances what they hold of a step, and counts their answers like claims."""
        machine = self._machine
        query = StepStatus(
            job=machine.job, epoch=machine.epoch, step=step, attempt=machine.attempt, evaluate=evaluate
        )

        async def ask_one(sid: str) -> None:
            try:
                reply = await self._job.bus.request(
                    STEP_STATUS, query, timeout_s=self._times.status_s, job=machine.job, sid=sid
                )
            except DmscError:
                return
            for claim in reply.claims:
                self._claimed(claim)

        await asyncio.gather(*(ask_one(member.sid) for member in members))
