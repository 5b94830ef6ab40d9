"""A job's instances leave machines that go away at a deadline (ADR-0171).

`leave_plan` decides how, anew at each look, by who has the state then. This service carries that out at the
moments at which an instance owns nothing: when a step is decided, and while training rests between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from bus.logs import get_logger
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.membership.leaving.leave_plan import (
    Leave,
    Leaver,
    LeaveTimes,
    Outlook,
    Way,
    plan_leave,
)
from entities.orchestrator.planning.scaling import added_replicas, with_units
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.step.step_loop import StageGone
from entities.orchestrator.step.step_owner import StepOwner
from schemas.errors import BadInput
from schemas.step import Member
from schemas.task_graph import TaskUnit

log = get_logger("orchestrator")

BY_CHECKPOINT = (Way.INTERRUPT, Way.CHECKPOINT)
WHILE_RESTING = (*BY_CHECKPOINT, Way.REST)


class Departures(Protocol):
    """What takes members out of a job (`membership.MembershipChanges`)."""

    def move(self, member: Member) -> None: ...

    def let_go(self, member: Member) -> None: ...

    def hand_over(self, member: Member) -> None: ...

    def dismiss(self, sid: str) -> None: ...

    def leave_out(self, sid: str, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Noticed:
    """When an instance's machine goes away, and when that was said last; both monotonic."""

    until: float
    asked_at: float


class NoticedLeave:
    """The instances of one job whose machines go away.

    `lapse_s`: for how long a notice counts that is not repeated.
    """

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        joining: JoiningMembers,
        checkpoints: Checkpoints,
        departures: Departures,
        times: LeaveTimes = LeaveTimes(),
        *,
        lapse_s: float = 5.0,
    ) -> None:
        self._job = job
        self._step_owner = step_owner
        self._joining = joining
        self._checkpoints = checkpoints
        self._departures = departures
        self._times = times
        self._lapse_s = lapse_s
        self._noticed: dict[str, _Noticed] = {}
        self._leaves: dict[str, Leave] = {}
        self._looks: asyncio.Handle | None = None
        self._decided_at = time.monotonic()
        self.successors: dict[str, str] = {}
        """Units that come to take a state, each with the one whose place it takes."""

    # --- asking -----------------------------------------------------------------------------------------
    @property
    def sids(self) -> frozenset[str]:
        """The units whose machines go away."""
        return frozenset(self._noticed)

    @property
    def needs_rest(self) -> bool:
        """Whether one of them leaves while training rests."""
        return any(leave.way in WHILE_RESTING for leave in self._leaves.values())

    def ask(self, sid: str, left_s: float) -> str:
        """The machine of a unit goes away in so many seconds. To be repeated until the instance has left.

        Returns:
            How it leaves, in words.
        """
        if not self._is_here(sid):
            return "it is being replaced"
        now = time.monotonic()
        self._noticed[sid] = _Noticed(now + left_s, now)
        if self._looks is None:  # at the next turn of the loop: all that leave at once are one case
            self._looks = asyncio.get_running_loop().call_soon(self._look)
        leave = self._leaves.get(sid)
        return "" if leave is None else leave.reason

    def _look(self) -> None:
        """Plans anew, and begins what needs no decision of a step."""
        self._looks = None
        if not self._step_owner.running or self._step_owner.at_end:
            return
        for leave in self._plan():
            if leave.way is Way.SUCCESSOR:
                self._bring_successor(leave.sid)
        interrupting = [leave for leave in self._leaves.values() if leave.way is Way.INTERRUPT]
        if interrupting:
            self._step_owner.give_up(f"{interrupting[0].sid} is {interrupting[0].reason}")

    # --- the plan -----------------------------------------------------------------------------------------
    def _plan(self) -> tuple[Leave, ...]:
        now = time.monotonic()
        self._noticed = {
            sid: notice
            for sid, notice in self._noticed.items()
            if now - notice.asked_at <= self._lapse_s and self._is_here(sid)
        }
        self._settle_successors()
        if not self._noticed:
            self._leaves = {}
            return ()
        working = {member.sid for members in self._step_owner.stages for member in members}
        leavers, staying, coming = [], Counter[int](), Counter[int]()
        for unit in self._job.instances.units:
            if (notice := self._noticed.get(unit.sid)) is not None:
                leavers.append(self._leaver(unit, notice.until - now, joined=unit.sid in working))
            elif unit.sid in working:
                staying[unit.stage] += 1
            elif unit.sid not in self._joining.replacement.homeless:
                coming[unit.stage] += 1
        leaves = plan_leave(leavers, staying, coming, self._outlook(now), self._times)
        self._tell(leaves, {leaver.sid: leaver.left_s for leaver in leavers})
        return leaves

    def _leaver(self, unit: TaskUnit, left_s: float, *, joined: bool) -> Leaver:
        needs_none = unit.is_data or unit.sid in self.successors.values()  # that one may have the last slot
        return Leaver(
            sid=unit.sid,
            stage=unit.stage,
            left_s=left_s,
            joined=joined or unit.is_data,
            memory_bytes=unit.requirements.memory_bytes,
            no_room="" if needs_none else self._joining.replacement.no_room([unit]),
        )

    def _outlook(self, now: float) -> Outlook:
        agents = {self._job.instances.agent_of(sid) for sid in self._noticed}
        rates = [
            rate
            for (sender, receiver), rate in self._job.mesh.links.bytes_per_s().items()
            if sender in agents and receiver not in agents
        ]
        return Outlook(
            step=self._step_owner.step,
            open_s=now - self._decided_at,
            step_s=self._checkpoints.step_s,
            checkpoint_s=self._checkpoints.cost_s,
            bytes_per_s=min(rates, default=None),
            checkpoint_step=self._job.store.record.checkpoint_step,
        )

    def _tell(self, leaves: tuple[Leave, ...], left_s: Mapping[str, float]) -> None:
        """The job's events say how each leaves, once, and again if that changes."""
        known = self._leaves
        self._leaves = {leave.sid: leave for leave in leaves}
        for leave in leaves:
            before = known.get(leave.sid)
            if before is not None and before.way is leave.way:
                self._leaves[leave.sid] = before  # it was said so; its figures change all the time
                continue
            left = f"its machine goes away in {left_s[leave.sid]:.0f} s"
            self._job.events.recovery(f"{leave.sid}, {left}: {leave.reason}")
            log.info("leaves", job=self._job.name, sid=leave.sid, way=leave.way, reason=leave.reason)

    def _is_here(self, sid: str) -> bool:
        """Whether the unit has an instance that could leave."""
        member = self._job.instances.members.get(sid)
        here = member is not None and self._job.instances.is_present(member)
        return here and sid not in self._joining.coming and any(unit.sid == sid for unit in self._units)

    @property
    def _units(self) -> tuple[TaskUnit, ...]:
        return self._job.instances.units

    # --- successors -----------------------------------------------------------------------------------------
    def _bring_successor(self, sid: str) -> None:
        """Has another replica of the unit's stage come, which takes the state while steps go on."""
        graph, stage = self._job.instances.graph, self._job.instances.graph.unit(sid).stage
        try:
            working = sum(not unit.standby for unit in graph.stage(stage))
            (successor,) = added_replicas(graph, stage, working + 1)
        except BadInput:  # the stage has standbys alone: the plan looks again when others come
            return
        if self._joining.replacement.no_room([successor]):
            return
        new = successor.sid
        self._job.instances.graph = with_units(graph, (successor,))
        self.successors[new] = sid
        self._joining.bring(new, given_up=lambda error: self._given_up(new, error.text))

    def _given_up(self, sid: str, why: str) -> None:
        self.successors.pop(sid, None)
        self._departures.leave_out(sid, why)

    def _settle_successors(self) -> None:
        """A successor leaves again if the other one stays, or came back by itself."""
        present = {unit.sid for unit in self._units}
        for new, old in list(self.successors.items()):
            if old not in self._noticed:
                del self.successors[new]
                if old in present and new in present:
                    self._departures.dismiss(new)

    # --- the moments at which they leave --------------------------------------------------------------------
    def decided(self) -> None:
        """A step was decided: those leave whose stage keeps a member."""
        self._decided_at = time.monotonic()
        if not (self._noticed or self.successors) or not self._step_owner.running or self._step_owner.at_end:
            return
        for leave in self._plan():
            if leave.way is Way.GO:
                self._go(leave.sid)

    async def at_rest(self) -> None:
        """Training rests: those leave whose stage keeps nobody, all at once, after a checkpoint of this step.

        Raises:
            MemberLost: a member died before the checkpoint was written; then nobody has left.
            StageGone: a stage has no member any more; the checkpoint brings it back.
        """
        self._decided_at = time.monotonic()
        if not self._noticed:
            return
        leaves, step = self._plan(), self._step_owner.step
        alone = [leave.sid for leave in leaves if leave.way in BY_CHECKPOINT]
        why = f"{', '.join(alone)} leaves before the machine goes away"
        if alone:
            taking = self._checkpoints.of_this_step(step, self._step_owner.stages, why)
            if not await self._job.tasks.unless_failed(taking):
                return  # the job's events say why; it is tried again at the next step
            leaves = self._plan()  # that took a while
        for leave in leaves:
            if leave.way in (Way.GO, Way.REST) and leave.sid not in alone:
                self._go(leave.sid)
        gone = [sid for sid in alone if self._is_here(sid)]
        for sid in gone:
            self._hand_over(sid)
        if gone:
            log.info("left by checkpoint", job=self._job.name, sids=gone, step=step)
            raise StageGone(self._job.instances.graph.unit(gone[0]).stage, why)

    def _go(self, sid: str) -> None:
        member = self._job.instances.members[sid]
        if self._forget(sid):
            self._departures.let_go(member)
        else:
            self._departures.move(member)

    def _hand_over(self, sid: str) -> None:
        """It leaves after a checkpoint, and so does a successor that has come too late for its state."""
        self._forget(sid, dismiss=True)
        self._departures.hand_over(self._job.instances.members[sid])

    def _forget(self, sid: str, *, dismiss: bool = False) -> bool:
        """It leaves now; returns whether another unit has its place."""
        self._noticed.pop(sid, None)
        self._leaves.pop(sid, None)
        new = next((new for new, old in self.successors.items() if old == sid), None)
        if new is None:
            return False
        del self.successors[new]
        if dismiss:
            self._departures.dismiss(new)
        return True
