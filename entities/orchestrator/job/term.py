"""`TermContext`: what the jobs of one term share. `insistently`: what a new leader can't do without."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from bus.connection import Bus
from bus.logs import get_logger
from entities.election.leadership import LeaderCandidate
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.job.shared_analyses import SharedAnalyses
from entities.orchestrator.job_state.context import AskModules, Claims, nobody_answers
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.planner.planning_process import PlanningConfig
from entities.queue.queue_rules import QueueRules
from schemas.errors import Unavailable

log = get_logger("orchestrator")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class TermContext:
    """One term of the leading orchestrator. It holds references and does nothing."""

    bus: Bus
    mesh: MeshView
    faults: FaultQueue
    candidate: LeaderCandidate
    """It knows the number of the term, and confirms that this orchestrator leads."""
    ended_kept: int
    """Ended jobs that stay in memory for listings; the bucket keeps all."""
    submissions_kept: int
    """Submissions that stay in memory: one that comes again through another gateway is the same job."""
    spawn: Callable[[Coroutine[None, None, None]], None]
    """Starts a task of the term."""
    planning: PlanningConfig
    """How plans are searched for."""
    queue_rules: QueueRules
    """How waiting jobs are decided about."""
    ask_modules: AskModules = nobody_answers
    """Asks the modules about a fault at hand."""
    claims: Claims = field(default_factory=dict)
    analyses: SharedAnalyses = field(default_factory=SharedAnalyses)
    code_of_builds: dict[str, str] = field(default_factory=dict)
    """The objects' names of archives of code that builds of data sets need, by build."""


async def insistently(work: Callable[[], Awaitable[Result]], retry_s: float = 0.2) -> Result:
    """Repeats `work` until the bus is available; a new leader can't do without the result."""
    while True:
        try:
            return await work()
        except Unavailable as error:
            log.warning("takeover waits for the bus", reason=error.text)
            await asyncio.sleep(retry_s)
