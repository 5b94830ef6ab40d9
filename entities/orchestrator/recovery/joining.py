"""New incarnations on their way into a running job (DESIGN §5 rule 10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.retry_limits import Parked, Unrecoverable
from entities.orchestrator.recovery.replacement import Replacement
from entities.orchestrator.step.step_owner import StepOwner
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.step import Member


class JoiningMembers:
    """Starts each unit's next incarnation in a task of its own, and tells the step loop when it is ready."""

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        replacement: Replacement,
    ) -> None:
        self._job = job
        self._step_owner = step_owner
        self.replacement = replacement
        self._coming: dict[str, asyncio.Task[None]] = {}

    @property
    def coming(self) -> Collection[str]:
        """SIDs of the units whose new incarnation is not ready yet."""
        return self._coming.keys()

    def bring(
        self,
        sid: str,
        lost: Member | None = None,
        first: Callable[[], Awaitable[None]] | None = None,
        given_up: Callable[[Unrecoverable], None] | None = None,
    ) -> None:
        """Starts a new incarnation of a unit, unless one is being started: that task retries by itself.

        Args:
            sid: the unit.
            lost: the incarnation before, which is ended first.
            first: work that has to be done first, about the end of the incarnation before.
            given_up: called if it can't be started, where the job can do without it; else the job fails.
        """
        present = self._coming.get(sid)
        if present is not None and not present.done():
            return
        task = self._job.tasks.spawn(self._bring(sid, lost, first, given_up))
        self._coming[sid] = task
        task.add_done_callback(lambda done: self._brought(sid, done))

    def forgo(self, sid: str) -> bool:
        """Stops looking for room for a unit; returns False if it is not without room."""
        task = self._coming.get(sid)
        if task is None or sid not in self.replacement.homeless:
            return False
        del self._coming[sid]
        task.cancel()
        return True

    async def _bring(
        self,
        sid: str,
        lost: Member | None,
        first: Callable[[], Awaitable[None]] | None,
        given_up: Callable[[Unrecoverable], None] | None,
    ) -> None:
        if first is not None:
            await first()
        try:
            newcomer = await self.replacement.bring(sid, lost, dispensable=given_up is not None)
        except Unrecoverable as error:
            if given_up is None:
                raise
            given_up(error)
            return
        self._job.events.changed(f"{newcomer.sid} is ready")
        self._step_owner.arrived(newcomer, self._job.instances.graph.unit(newcomer.sid).stage)

    def _brought(self, sid: str, task: asyncio.Task[None]) -> None:
        if self._coming.get(sid) is task:
            del self._coming[sid]
        member = self._job.instances.members.get(sid)
        if member in self._job.instances.lost and not task.cancelled() and task.exception() is None:
            self.bring(sid, member)  # it died as soon as it was ready

    async def until_there(self) -> None:
        """Returns once every lost unit has its new incarnation, except units that the job can do without.

        Raises:
            Parked: a unit that the job needs finds no room.
        """
        with self._job.bus.pulse.held():  # a bus that stands still keeps all instances from starting
            await self._until_there()

    async def _until_there(self) -> None:
        times = self._job.times.recovery
        now, homeless = self._job.bus.pulse.now, self.replacement.homeless
        began = bare_since = now()
        while coming := set(self._coming):
            missing = self._indispensable() & coming
            late = now() - began > times.parked_after_s
            if not missing and (late or coming <= homeless.keys()):
                return
            if not missing or not missing <= homeless.keys():
                bare_since = now()
            if now() - bare_since > times.parked_after_s:
                why = "; ".join(f"{sid}: {homeless[sid]}" for sid in sorted(missing))
                raise Parked(why, for_room=True, unstaffed=True)
            await self._job.tasks.unless_failed(asyncio.wait([*self._coming.values()], timeout=times.look_s))

    def _indispensable(self) -> set[str]:
        """Units that the job needs: those of a stage (data instances too) without a working member."""
        instances = self._job.instances
        present = {member.sid for member in instances.present()} - self._coming.keys()
        working = {unit.stage for unit in instances.units if unit.sid in present}
        return {unit.sid for unit in instances.units if unit.stage not in working}

    async def newcomer(self, stage: int) -> Member | None:
        """A newcomer for a stage without members, once it can take the state; None if none is on its way."""
        sids = {unit.sid for unit in self._job.instances.graph.stage(stage)}
        while self._step_owner.running:
            machine = self._step_owner.loop.machine
            for member in machine.newcomers:
                if machine.stage_of(member) == stage and member not in self._job.instances.lost:
                    return member
            coming = [task for sid, task in self._coming.items() if sid in sids and not task.done()]
            if not coming:
                return None
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
        return None

    def introduce(self, resume_point: ResumePoint) -> None:
        """Tells the new step loop of members that are ready but not among `resume_point`.

        They became ready while no loop ran, or had not joined the loop before.
        """
        present = set(resume_point.everyone) | self._job.instances.lost
        for unit in self._job.instances.units:
            member, task = self._job.instances.members.get(unit.sid), self._coming.get(unit.sid)
            if member is not None and member not in present and (task is None or task.done()):
                self._step_owner.arrived(member, unit.stage)
