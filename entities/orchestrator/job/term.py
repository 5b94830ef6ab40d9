"""`TermContext`: what the jobs of one term share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from bus.connection import Bus
from entities.election.leadership import LeaderCandidate
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.job_state.context import Claims
from entities.orchestrator.mesh.mesh_view import MeshView

Result = TypeVar("Result")


class KeptJobs(Protocol):
    """How many jobs of the past stay in memory."""

    @property
    def ended_kept(self) -> int:
        """Ended jobs, for listings; the bucket keeps all."""

    @property
    def submissions_kept(self) -> int:
        """Submissions, so that one that comes again through another gateway is the same job."""


class Insistence(Protocol):
    async def __call__(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Repeats `work` until the bus is back."""


@dataclass(frozen=True, kw_only=True)
class TermContext:
    """One term of the leading orchestrator. It holds references and does nothing."""

    bus: Bus
    mesh: MeshView
    faults: FaultQueue
    candidate: LeaderCandidate
    """It knows the number of the term, and confirms that this orchestrator leads."""
    config: KeptJobs
    spawn: Callable[[Coroutine[None, None, None]], None]
    """Starts a task of the term."""
    insistently: Insistence
    claims: Claims = field(default_factory=dict)
