"""A job that a person parks waits without instances until a person resumes it.

The order is in the job's record (`held`), so that it survives a change of orchestrators. A running job stops
at the end of a step, at a checkpoint of that step; if it does not get there in time, it stops at its last
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from bus.tasks import cancel
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.retry_limits import Parked
from schemas.errors import Conflict, Unavailable
from schemas.job import JobState


async def written_down(writing: Awaitable[None], within_s: float) -> None:
    """Waits for the write of a person's order; where the bus does not take it, the order counts all the same.

    Raises:
        Fenced: another orchestrator has the job.
    """
    with contextlib.suppress(Unavailable, TimeoutError):
        async with asyncio.timeout(within_s):
            await writing


class Parkable(Protocol):
    """What comes to rest when a job is to be parked: its training, or the instances of a service."""

    def park(self, why: str, *, for_room: bool = False) -> bool:
        """Has it stop soon; '' withdraws that. Returns: it runs."""


class Parking:
    """Parks and resumes one run of a job.

    Args:
        interrupt: ends the run where it stands; returns whether there was something to end.
        before: why the job was parked before this run; None: it was not, or was resumed.
        in_queue: whether it waits for slots, so that there is nothing to end.
    """

    def __init__(
        self,
        job: JobContext,
        training: Parkable,
        interrupt: Callable[[], bool],
        before: Parked | None,
        in_queue: Callable[[], bool],
    ) -> None:
        record = job.store.record
        self._job = job
        self._times = job.times.run
        self._training = training
        self._interrupt = interrupt
        self._before = before
        self._in_queue = in_queue
        self._resumed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._taking_over = record.epoch > 1 and record.state is not JobState.PARKED
        self.interrupted = False
        self._gives_way = ""

    # --- orders of a person -------------------------------------------------------------------------------
    @property
    def hold_reason(self) -> str:
        """Who parked the job, and why; empty: nobody did."""
        return self._job.store.record.held

    @property
    def _has_begun(self) -> bool:
        record = self._job.store.record
        return record.loss_first is not None or record.state not in (JobState.QUEUED, JobState.ANALYSING)

    async def park(self, why: str) -> None:
        """Parks the job; its slots are free in a moment. One that has not begun is held in the queue."""
        record = self._job.store.record
        if self.hold_reason and not record.dormant:
            return
        if record.dormant and record.state is JobState.PARKED:  # from now on no request resumes it
            writing = self._job.store.move(JobState.PARKED, why, held=why, dormant=False)
            await written_down(writing, self._times.order_kept_s)
            return
        self._resumed.clear()
        waits = not self._has_begun and self._in_queue()
        writing = self._job.store.note(now=True, held=why, dormant=False)
        await written_down(writing, self._times.order_kept_s)
        if self.hold_reason != why:  # it was resumed while that was written
            return
        if waits and self._in_queue():  # it got no slots meanwhile
            self._job.queue.again()
            return
        if not self._taking_over and not self._come_to_rest(why):
            self._break_off()

    async def rest(self, why: str) -> bool:
        """Has a running version of a service give its slots back until somebody asks it; False: not now.

        Whoever asks it meanwhile has it stay: see `resume`.
        """
        if not self.can_give_way:
            return False
        self._resumed.clear()
        writing = self._job.store.note(now=True, held=why, dormant=True)
        await written_down(writing, self._times.order_kept_s)
        if not self._job.store.record.dormant:  # it was asked, or parked, while that was written
            return False
        return self._come_to_rest(why)

    async def resume(self, why: str) -> None:
        """Has the job go on as soon as there is room; if it is not parked yet, it just keeps running.

        Raises:
            Conflict: the job is neither parked nor about to be.
        """
        record = self._job.store.record
        parked = record.state is JobState.PARKED
        if not parked and not self.hold_reason:
            raise Conflict(f"job {record.job} is {record.state}: only a parked one can be resumed")
        if not self.waits:
            return  # it waits for room only: it is in the queue already
        self.stop()
        used = record.usage.held(record.usage.slots, time.time()).held_s
        changes: dict[str, Any] = {"held": "", "dormant": False, "resumed_held_s": used}
        writing = (
            self._job.store.move(record.state, why, **changes) if parked else self._job.store.note(**changes)
        )
        await written_down(writing, self._times.order_kept_s)
        self._job.queue.goes_on(record.job)
        if not self._has_begun:
            return  # it was held in the queue
        if not self._training.park("") or self.interrupted:
            self._resumed.set()

    @property
    def can_give_way(self) -> bool:
        """Whether it trains, and nobody has had it park."""
        parks = self.hold_reason or self._gives_way or self._taking_over
        return not parks and self._job.store.record.state is JobState.RUNNING

    def give_way(self, why: str, *, held: bool) -> bool:
        """Has a running job park for another one, and go on as soon as there is room; False: not now.

        `held`: it waits for a person.
        """
        if held:
            self._job.tasks.spawn(self.park(why))
            return True
        if not self.can_give_way:
            return False
        if not self._come_to_rest(why, for_room=True):
            return False
        self._gives_way = why
        return True

    # --- what its run hands in ------------------------------------------------------------------------------
    @property
    def waits(self) -> bool:
        """The job needs more than room to go on."""
        return bool(self.hold_reason) or (self._before is not None and not self._before.for_room)

    @property
    def resumed(self) -> bool:
        """The job was resumed while it was being parked."""
        return self._resumed.is_set()

    async def until_resumed(self) -> None:
        """Returns once the job may look for room again.

        A job that a person parked waits for a person. One that failed for another reason than room also goes
        on once a place is open that was not there, or not open, before.
        """
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(self._resumed.wait())}
        if not self.hold_reason:
            otherwise = self._job.mesh.until_open_otherwise(self._job.mesh.open_places())
            waits.add(asyncio.ensure_future(otherwise))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*waits)
        self._before = None
        self._resumed.clear()

    def taken_over(self, *, adopted: bool) -> None:
        """Called once it is known whether the job goes on with instances of an earlier orchestrator.

        Raises:
            Parked: it does not, and a person has parked it.
        """
        self._taking_over = False
        if self.hold_reason and not (adopted and self._come_to_rest(self.hold_reason)):
            raise Parked(self.hold_reason, for_room=False)

    def stop(self) -> None:
        """Cancels the deadline: the run is over or goes on, and must not be interrupted."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def as_parked(self) -> Parked:
        """Why a run that was interrupted is parked."""
        if self._gives_way and not self.hold_reason:
            return Parked(self._gives_way, for_room=True)
        return Parked(self.hold_reason or "parked", for_room=False)

    def _come_to_rest(self, why: str, *, for_room: bool = False) -> bool:
        """Has the job stop at the end of the open step; returns False if it is not in training."""
        if not self._training.park(why, for_room=for_room):
            return False
        self._deadline = asyncio.get_running_loop().call_later(
            self._job.instances.patience_s(self._times.rest_s), self._break_off
        )
        return True

    def _break_off(self) -> None:
        self.interrupted = self._interrupt()
