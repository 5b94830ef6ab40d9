"""What a step loop reports to its owner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from entities.orchestrator.transaction.step_events import RecomputationNoted
from entities.orchestrator.transaction.step_ledger import StepLedger
from schemas.step import Member, StepDecision


class StepObserver(Protocol):
    """The owner of a step loop. The methods that are not coroutines must return at once."""

    def decided(self, ledger: StepLedger, decision: StepDecision) -> None:
        """The commit point of a step has passed."""

    def committed(self, step: int) -> None:
        """All living members have applied the step."""

    def losing(self, members: Iterable[Member], why: str) -> None:
        """These did not answer, or cannot work with the others; the observer calls `lost` for them."""

    def silence(self, witness: Member, peer: Member) -> None:
        """`witness` got no answer from `peer` at the address that `peer` gives."""

    def replayed(self, replay: RecomputationNoted) -> None:
        """Microbatches of lost members are computed again."""

    def restarting(self, step: int, reason: str) -> None:
        """The open step begins again.

        Raises:
            StepBroken: it has begun again too often.
        """

    async def bring_back(self, stage: int, version: int) -> Member | None:
        """Restores a stage without living members; returns a newcomer that is at `version`, or None."""

    async def other_gateway(self, failed: str) -> None:
        """The entry gateway `failed` does not answer: choose another one."""
