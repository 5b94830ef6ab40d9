"""A job that a person parks waits without instances, until a person resumes it.

What was said is in the job's record (`held`), so that it outlives orchestrators. A running job stops where a
step ends, at a checkpoint of that very step; one that comes to no such place in time, at its last one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from entities.orchestrator.job.training import Training
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.errors import Conflict, Unavailable
from schemas.job import JobState

REST_S = 20.0
"""How long a step that is open, and the checkpoint behind it, may take when the job is to be parked."""
KEPT_S = 5.0
"""How long it is waited until the bus has written down what a person asked for: its disk may be full. Shorter
than a gateway waits for the answer; the record follows as soon as there is room."""


async def written_down(writing: Awaitable[None]) -> None:
    """What a person asked for is being written. Where the bus does not take it, it counts all the same.

    Raises:
        Fenced: another orchestrator has the job.
    """
    with contextlib.suppress(Unavailable, TimeoutError):
        async with asyncio.timeout(KEPT_S):
            await writing


class Parking:
    """Of one run of a job.

    Args:
        rest_s: how long its open step is waited for.
        interrupt: ends the run where it stands; whether there was something to end.
        before: why the job was parked before this run; None: it was not, or was resumed.
    """

    def __init__(
        self,
        journal: JobStore,
        mesh: MeshView,
        training: Training,
        rest_s: Callable[[], float],
        interrupt: Callable[[], bool],
        before: Parked | None,
    ) -> None:
        record = journal.record
        self._journal = journal
        self._mesh = mesh
        self._training = training
        self._rest_s = rest_s
        self._interrupt = interrupt
        self._before = before
        self._resumed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._taking_over = record.epoch > 1 and record.state is not JobState.PARKED
        self.interrupted = False

    # --- what a person asks for ---------------------------------------------------------------------------
    @property
    def held(self) -> str:
        """By whom it was parked, and why; empty: by nobody."""
        return self._journal.record.held

    async def park(self, why: str) -> None:
        """Has the job wait; its slots are free in a moment.

        Raises:
            Conflict: it has not begun.
        """
        record = self._journal.record
        if record.state in (JobState.QUEUED, JobState.ANALYSING) and record.loss_first is None:
            raise Conflict(f"job {record.job} has not begun and holds nothing; `dmsc cancel` ends it")
        if self.held:
            return
        self._resumed.clear()
        await written_down(self._journal.note(now=True, held=why))
        if not self._taking_over and not self._come_to_rest():
            self._break_off()

    async def resume(self, why: str) -> None:
        """Has it go on as soon as there is room; one that is still on its way to be parked stays.

        Raises:
            Conflict: nothing keeps it.
        """
        record = self._journal.record
        parked = record.state is JobState.PARKED
        if not parked and not self.held:
            raise Conflict(f"job {record.job} is {record.state}: only a parked one can be resumed")
        if not self.waits:
            return  # for room alone: it stands in the line
        self.stop()
        writing = self._journal.move(record.state, why, held="") if parked else self._journal.note(held="")
        await written_down(writing)
        if not self._training.park("") or self.interrupted:
            self._resumed.set()

    # --- what its run hands in ------------------------------------------------------------------------------
    @property
    def waits(self) -> bool:
        """More than room is needed for it to go on."""
        return bool(self.held) or (self._before is not None and not self._before.for_room)

    @property
    def resumed(self) -> bool:
        """Somebody said so while it was being parked."""
        return self._resumed.is_set()

    async def until_resumed(self) -> None:
        """One that a person parked waits for a person; one that room alone does not help, also for a place
        that was not there, or not open."""
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._resumed.wait())}
        if not self.held:
            otherwise = self._mesh.until_open_otherwise(self._mesh.open_places())
            waits.add(asyncio.ensure_future(otherwise))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._before = None
        self._resumed.clear()

    def taken_over(self, *, adopted: bool) -> None:
        """Whether the job goes on with the instances of an orchestrator before this one is known.

        Raises:
            Parked: it does not, and is to wait.
        """
        self._taking_over = False
        if self.held and not (adopted and self._come_to_rest()):
            raise Parked(self.held, for_room=False)

    def stop(self) -> None:
        """The run is over, or goes on: it is not to be interrupted any more."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _come_to_rest(self) -> bool:
        """Whether the job is in training, and will be parked at the end of the open step."""
        if not self._training.park(self.held):
            return False
        self._deadline = asyncio.get_running_loop().call_later(self._rest_s(), self._break_off)
        return True

    def _break_off(self) -> None:
        self.interrupted = self._interrupt()
