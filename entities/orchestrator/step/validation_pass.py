"""One validation pass at a boundary: forward only, losses from the last stage."""

from __future__ import annotations

import asyncio

from entities.orchestrator.step.claim_repair import ClaimRepair
from entities.orchestrator.step.step_orders import StepOrders
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.errors import DmscError
from schemas.step import MicrobatchClaim


class PassBroken(DmscError):
    """The validation pass has to be repeated."""

    code = "again"


class ValidationPass:
    """A validation of the weights at `version`, by the members that are there when it begins."""

    def __init__(
        self, machine: StepMachine, orders: StepOrders, repair: ClaimRepair, version: int, microbatches: int
    ) -> None:
        self._machine = machine
        self._orders = orders
        self._repair = repair
        self._version = version
        self._count = microbatches
        self._scored: dict[int, MicrobatchClaim] = {}
        self._progress = asyncio.Event()

    def claimed(self, claim: MicrobatchClaim) -> None:
        """A claim arrived; only claims of the last stage carry a loss. One of an earlier pass may be late."""
        if claim.step == self._version and claim.loss is not None and 0 <= claim.microbatch < self._count:
            self._scored[claim.microbatch] = claim
            self._progress.set()

    async def run(self) -> dict[int, MicrobatchClaim]:
        """Runs the pass; returns the last stage's claims by microbatch.

        Raises:
            PassBroken: a member was lost or joined, or no progress is made.
        """
        machine = self._machine
        attempt, members = machine.attempt, machine.stages
        await self._orders.begin(self._version, attempt, evaluate=True)
        moved_at = self._repair.now()
        while len(self._scored) < self._count:
            self._progress.clear()
            try:
                async with asyncio.timeout(self._repair.quiet_s):
                    await self._progress.wait()
                moved_at = self._repair.now()
            except TimeoutError:
                await self._repair.ask(self._version, machine.stages[-1], evaluate=True)
                if self._repair.now() - moved_at > self._repair.patience_s:
                    raise PassBroken("no progress") from None
            if (machine.attempt, machine.stages) != (attempt, members):
                raise PassBroken("somebody was lost, or joined")
        return self._scored
