"""Requested changes of a job's members: other numbers of replicas, and instances that leave their node.

The members that leave are healthy, so they leave when a step is decided, or while training rests between two
steps: then nothing is computed twice, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from bus.logs import get_logger
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.membership.drain_order import DrainOrder
from entities.orchestrator.membership.leaving.noticed_leave import NoticedLeave
from entities.orchestrator.planning.scaling import added_replicas, removed_replicas, with_units, without_units
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.recovery.standbys import Standbys
from entities.orchestrator.step.step_loop import StageGone
from entities.orchestrator.step.step_owner import StepOwner
from schemas.errors import Conflict, DmscError
from schemas.step import Member
from schemas.task_graph import ENTRY, is_before_entry, is_data

log = get_logger("orchestrator")


class MembershipChanges:
    """`scale` and `drain` request changes; `decided` and `at_rest` carry them out at the right moment."""

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        joining: JoiningMembers,
        standbys: Standbys,
        checkpoints: Checkpoints,
    ) -> None:
        self._job = job
        self._step_owner = step_owner
        self._joining = joining
        self._standbys = standbys
        self._checkpoints = checkpoints
        self._drain_order = DrainOrder(job, joining.replacement, lambda sid: self.on_stay(sid))
        self.noticed = NoticedLeave(job, step_owner, joining, checkpoints, self)
        self._leaving: set[str] = set()  # units that will leave the job
        self._going: set[str] = set()  # units whose instance is being ended
        self.on_hand_over: Callable[[str], None] = lambda sid: None
        """Called with each unit whose instance leaves its slot now, for another to take its place."""
        self.on_stay: Callable[[str], None] = lambda sid: None
        """Called with each unit whose instance was to leave its slot, and does not."""

    @property
    def leaving(self) -> frozenset[str]:
        """Units that were told to leave and have not been seen to exit."""
        return frozenset(self._leaving | self._going | {*self.noticed.successors.values()})

    @property
    def departing(self) -> str:
        """Whose instance is to leave its slot or the job once the open step is decided, in words, or ''."""
        departing = ", ".join(sorted(self._leaving | self._drain_order.requested | self.noticed.sids))
        return f"{departing} is about to leave" if departing else ""

    @property
    def homeless(self) -> Collection[str]:
        """Units that wait for a slot."""
        return self._joining.replacement.homeless.keys()

    def scale(self, stages: Sequence[int], replicas: int) -> str:
        """Gives these stages more or fewer working replicas; returns what will happen, in words.

        New replicas are placed now and join once they hold the state; replicas leave when the open step is
        decided. Those that gateways dispatch to leave while training rests.

        Raises:
            BadInput: no such stage, or fewer than one replica.
            Conflict: there is no room for all of them, or a replica is just leaving.
        """
        graph = self._job.instances.graph
        stays = {unit.sid for unit in graph.units if unit.stage in stages}
        if going := sorted(stays & self._going):
            stage = graph.unit(going[0]).stage
            raise Conflict(f"{', '.join(going)} of stage {stage} is just leaving: ask again in a moment")
        added = [unit for stage in stages for unit in added_replicas(graph, stage, replicas)]
        homeless = self._joining.replacement.homeless
        removed = [unit for stage in stages for unit in removed_replicas(graph, stage, replicas, homeless)]
        if added and (why := self._joining.replacement.no_room(added)):
            which = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"
            raise Conflict(f"{which} can't have {replicas} replicas now: {why}")
        staying = sorted(self._leaving & stays - {unit.sid for unit in removed})
        self._leaving = self._leaving - stays | {unit.sid for unit in removed}
        if added:
            self._job.instances.graph = with_units(graph, tuple(added))
            for unit in added:
                self._joining.bring(unit.sid)
        said = [
            f"{', '.join(sids)} will {verb}"
            for verb, sids in (
                ("join", [unit.sid for unit in added]),
                ("leave", [unit.sid for unit in removed]),
                ("stay", staying if not removed and not added else []),
            )
            if sids
        ]
        return "; ".join(said) or "nothing to do"

    def drain(self, sid: str) -> str:
        """Has an instance leave its node once the open step is decided; returns an obstacle, or ''.

        The caller asks again until the instance is gone.
        """
        if not self._step_owner.running:
            return "the job is being brought back"
        return self._drain_order.ask(sid, self._step_owner.stages, self._joining.coming)

    def migrate(self, sid: str, agent: str | None) -> str:
        """Has an instance leave its slot for another one once the open step is decided; returns an obstacle.

        Args:
            sid: its unit.
            agent: the node agent in whose slots it is to go on; None: any.
        """
        replacement = self._joining.replacement
        replacement.send_away(sid, agent)
        if why := self.drain(sid):
            replacement.stay(sid)
        return why

    @property
    def need_rest(self) -> bool:
        """Whether an instance is to leave that can do so only while training rests."""
        drains = self._drain_order.waits(self._step_owner.stages)
        return drains or self.noticed.needs_rest or bool(self._leaving_entries())

    def decided(self) -> None:
        """A step was decided: members that are to leave do so, for they own nothing of the next step yet."""
        self.noticed.decided()
        working = {member for members in self._step_owner.stages for member in members}
        for sid in sorted(self._leaving):
            member = self._job.instances.members.get(sid)
            if self._joining.forgo(sid):
                self.leave_out(sid, "there was no room for it")
                continue
            if member is None or not self._step_owner.running:
                continue
            if member not in working and not self._is_aside(member):
                continue  # it has not joined yet: it leaves once it has
            self.let_go(member)
        if not self._step_owner.at_end:
            stages = self._step_owner.stages
            member = self._drain_order.next(stages, self._joining.coming, at_rest=False)
            if member is not None:
                self.move(member)

    async def at_rest(self) -> None:
        """Lets one instance leave its node, or all whose machines go away. If no member of their stage is
        left, a checkpoint is taken before.

        Raises:
            MemberLost: a member died before the checkpoint was written.
            StageGone: a stage has no member any more; the checkpoint brings it back.
        """
        await self.noticed.at_rest()
        if entries := self._leaving_entries():
            for entry in entries:
                self.let_go(entry)
            return
        stages = self._step_owner.stages
        member = self._drain_order.next(stages, self._joining.coming, at_rest=True)
        if member is None:
            return
        stage = self._job.instances.graph.unit(member.sid).stage
        if is_data(stage):
            self.move(member)
            return
        why, step = f"{member.sid} leaves its node", self._step_owner.step
        try:
            written = await self._job.tasks.unless_failed(self._checkpoints.of_this_step(step, stages, why))
        except DmscError:
            self._drain_order.drop(member.sid)  # it was taken off the order above, so nobody else would
            raise
        if not written:
            self._drain_order.drop(member.sid)
            return  # the job's events say why; the drain asks again
        log.info("hand-over by checkpoint", job=self._job.name, sid=member.sid, step=step)
        self.hand_over(member)
        raise StageGone(stage, why)

    def hand_over(self, member: Member) -> None:
        """Has a member leave its node after a checkpoint, which its next incarnation takes."""
        self._job.instances.mark_lost(member)
        self.on_hand_over(member.sid)
        self._joining.bring(member.sid, member)

    def dismiss(self, sid: str) -> None:
        """A unit leaves the job at the end of a step, as soon as it has joined or has found no room."""
        self._leaving.add(sid)

    def _leaving_entries(self) -> list[Member]:
        """Members that gateways dispatch to, and that are to leave."""
        instances = self._job.instances
        members = (instances.members.get(unit.sid) for unit in instances.graph.units if unit.stage == ENTRY)
        return [
            member
            for member in members
            if member is not None and member.sid in self._leaving and member not in instances.lost
        ]

    def _is_aside(self, member: Member) -> bool:
        """Whether it is ready, and no member of the step transaction: it only answers others."""
        unit = next((unit for unit in self._job.instances.graph.units if unit.sid == member.sid), None)
        here = member not in self._job.instances.lost and member.sid not in self._joining.coming
        return unit is not None and is_before_entry(unit.stage) and here

    def let_go(self, member: Member) -> None:
        """Has a member leave the job. Call it when a step is decided."""
        self._leaving.discard(member.sid)
        self._going.add(member.sid)
        self.part_with(member)
        self._job.tasks.spawn(self._forget(member))

    def leave_out(self, sid: str, why: str) -> None:
        """A replica that could not join is one of the job's no more."""
        self._leaving.discard(sid)
        self._job.instances.graph = without_units(self._job.instances.graph, {sid})
        self._job.instances.members.pop(sid, None)
        self._job.events.changed(f"{sid} is given up: {why}")

    def move(self, member: Member) -> None:
        """Has a member leave its node; a new incarnation takes its place. Call it when a step is decided."""
        log.info("hand-over", job=self._job.name, sid=member.sid, step=self._step_owner.step)
        self.part_with(member)
        self.on_hand_over(member.sid)
        self._joining.bring(member.sid, member)
        self._job.events.recovery(f"{member.sid} leaves its node: another takes its place")

    def part_with(self, member: Member) -> None:
        """Removes a member. Call it when a step is decided: then it owns nothing of the open step."""
        self._job.instances.mark_lost(member)
        self._step_owner.lost(member)
        self._standbys.revise()

    async def _forget(self, member: Member) -> None:
        try:
            await self._joining.replacement.end(member)
            self._job.instances.graph = without_units(self._job.instances.graph, {member.sid})
            if self._job.instances.members.get(member.sid) == member:
                del self._job.instances.members[member.sid]
        finally:
            self._going.discard(member.sid)
        self._job.events.changed(f"{member.sid} has left")
