"""What a step loop tells whoever runs it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from entities.orchestrator.transaction.step_events import RecomputationNoted
from entities.orchestrator.transaction.step_ledger import StepLedger
from schemas.step import Member, StepDecision


class StepObserver(Protocol):
    """Runs the loop, and is told; none of what returns at once may wait."""

    def decided(self, ledger: StepLedger, decision: StepDecision) -> None:
        """The commit point of a step is passed."""

    def committed(self, step: int) -> None:
        """All living members have applied the step."""

    def losing(self, members: Iterable[Member], why: str) -> None:
        """These did not answer, or cannot work with the others; the observer calls `lost` for them."""

    def silence(self, witness: Member, peer: Member) -> None:
        """`witness` finds nothing but silence where `peer` says that it is."""

    def replayed(self, replay: RecomputationNoted) -> None:
        """Microbatches of the lost are computed again."""

    def restarting(self, step: int, reason: str) -> None:
        """The open step is begun again; raises `StepBroken` if that was once too often."""

    async def bring_back(self, stage: int, version: int) -> Member | None:
        """Nobody of a stage lives: a newcomer that holds its state at `version` again; None if none can."""

    async def other_gateway(self, failed: str) -> None:
        """The entry gateway does not answer: name another one."""
