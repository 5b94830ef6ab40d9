"""Moves of an instance from one stage to another, carried out when a step is decided (ADR-0018).

The instance leaves its stage like a replica that `scale` removes: it owns nothing of the next step, so
nothing is lost. Its slot then hosts a new process of the other stage, which takes the state from a peer and
joins like any newcomer. `planning.stage_moves` says which move is possible, the account of changes which one
is worth it, and what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bus.logs import get_logger
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.membership.job_changes import JobChanges
from entities.orchestrator.membership.stage_moves import StageMembers, direction, impossible
from entities.orchestrator.planning.scaling import added_replicas, with_units, without_units
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.step.step_owner import StepOwner
from schemas.actions import place_knob
from schemas.automation import OWN_LOOP
from schemas.changes import Forecast, JobChange
from schemas.errors import Conflict, DmscError
from schemas.step import Member
from schemas.task_graph import TaskUnit

log = get_logger("orchestrator")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRequest:
    """A requested move that has not begun. `forecast`: None if a person ordered it."""

    sid: str
    stage: int
    by: str
    forecast: Forecast | None
    takes_back: bool = False

    @property
    def by_person(self) -> bool:
        """Whether a person ordered it."""
        return self.forecast is None and not self.takes_back


class Rebalancing:
    """The moves of one job. `part_with` removes a member that owns nothing of the open step."""

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        joining: JoiningMembers,
        changes: JobChanges,
        part_with: Callable[[Member], None],
    ) -> None:
        self._job = job
        self._step_owner = step_owner
        self._joining = joining
        self._part_with = part_with
        self._changes = changes
        self._request: MoveRequest | None = None
        self._changing = ""
        self.on_set: Callable[[str, str | None, str], None] = lambda knob, value, by: None
        """Called with knob, value and user where a person's move sets an instance's place; None: no more."""

    @property
    def under_way(self) -> str:
        """Who changes its stage, from the request until the newcomer is one of the units; else ''."""
        return self._changing or ("" if self._request is None else self._request.sid)

    def check_nobody_moves(self) -> None:
        """Raises `Conflict` while an instance changes its stage."""
        if self.under_way:
            raise Conflict(f"{self.under_way} is changing its stage: ask again in a moment")

    def ask(self, sid: str, stage: int, by: str, forecast: Forecast | None = None) -> str:
        """Has an instance change its stage once the open step is decided; returns that in words.

        Args:
            sid: the instance.
            stage: its new stage.
            by: who requests it.
            forecast: what a policy expects of the move; None: a person orders it, whatever its effect.

        Raises:
            Conflict: the move is impossible or not worth it; the text says why.
        """
        if why := self.objection(sid, stage, forecast):
            raise Conflict(f"{sid} does not move to stage {stage}: {why}")
        self._request = MoveRequest(sid=sid, stage=stage, by=by, forecast=forecast)
        return f"{sid} will leave for stage {stage} at the end of this step"

    def objection(self, sid: str, stage: int, forecast: Forecast | None) -> str:
        """Why this move is impossible now or, with a forecast, not worth it; empty if it can begin."""
        why = self._obstacle(sid, stage)
        if not why and forecast is not None:
            here = self._crew().stage_of(sid)
            there, back = direction(here, stage), direction(stage, here)
            why = self._changes.account.unwise("move", there, back, forecast)
            if not self._job.spec.parallel.rebalance:
                why = "the job says parallel.rebalance: false"
        if not why and self._request is not None:
            why = f"{self._request.sid} is about to move to stage {self._request.stage}"
        return why

    def decided(self) -> None:
        """A step was decided: a requested move begins."""
        request, self._request = self._request, None
        if request is None or self._step_owner.at_end:
            return
        why = self._obstacle(request.sid, request.stage)
        if why:
            log.info("move dropped", job=self._job.name, sid=request.sid, stage=request.stage, reason=why)
            self._job.queue.again()  # growth that waited for it need not wait any more
            return
        self._begin(request)

    def _obstacle(self, sid: str, stage: int) -> str:
        if not self._step_owner.running:
            return "the job is being brought back"
        why = impossible(sid, stage, self._crew()) or self._changes.account.obstacle()
        if not why and not self._joining.replacement.is_open(sid):
            why = f"{sid}'s slot is cordoned, or its node is not there"
        if not why:
            why = self._joining.replacement.unfit_for(sid, stage)
        return why

    def _crew(self) -> StageMembers:
        """The living members that work, by stage."""
        graph = self._job.instances.graph
        standbys = frozenset(unit.sid for unit in graph.units if unit.standby)
        return StageMembers(
            working={
                stage: [member.sid for member in members if member.sid not in standbys]
                for stage, members in enumerate(self._step_owner.stages)
            },
            standbys=standbys,
            coming=tuple(sorted(self._joining.coming)),
        )

    def _begin(self, request: MoveRequest) -> None:
        graph = self._job.instances.graph
        member, unit = self._job.instances.members[request.sid], graph.unit(request.sid)
        working = sum(not other.standby for other in graph.stage(request.stage))
        (newcomer,) = added_replicas(graph, request.stage, working + 1)
        here, there = unit.stage, request.stage
        self._changes.begin(
            JobChange(
                kind="move",
                what=f"{request.sid} (stage {here}) → {newcomer.sid} (stage {there})",
                direction=direction(here, there),
                reverse=direction(there, here),
                sid=request.sid,
                newcomers=(newcomer.sid,),
                from_stage=here,
                to_stage=there,
                step=self._step_owner.step,
                by=request.by,
                forecast=request.forecast,
                takes_back=request.takes_back,
            ),
            lambda change: self._take_back(newcomer.sid, here),
        )
        if request.by_person:
            self.on_set(place_knob(request.sid), None, request.by)
            self.on_set(place_knob(newcomer.sid), f"stage {there}", request.by)
        self._changing = request.sid
        self._part_with(member)
        self._job.tasks.spawn(self._rehost(request, member, unit, newcomer))

    def _take_back(self, sid: str, stage: int) -> None:
        """Has the one that moved go back to its stage: steps have become longer."""
        if why := self._obstacle(sid, stage):
            raise Conflict(f"{sid} does not go back to stage {stage}: {why}")
        self._request = MoveRequest(sid=sid, stage=stage, by=OWN_LOOP, forecast=None, takes_back=True)

    async def _rehost(self, request: MoveRequest, member: Member, unit: TaskUnit, newcomer: TaskUnit) -> None:
        """Ends the member, then has its slot host the newcomer.

        Until the member has ended, the job's record names it; afterwards it names the newcomer. So an
        orchestrator that takes over finds one of the two, and starts it if it is missing.
        """
        await self._joining.replacement.end(member)
        self._swap(unit, newcomer)
        self._changing = ""
        if self._job.instances.members.get(member.sid) == member:
            del self._job.instances.members[member.sid]
        self._job.events.changed(f"{newcomer.sid} takes the place of {member.sid}")
        await self._job.events.written()  # the record names the newcomer before it lives
        await self._joining.replacement.until_free(newcomer)
        self._joining.bring(newcomer.sid, given_up=lambda why: self._go_back(request, newcomer, unit, why))

    def _go_back(self, request: MoveRequest, newcomer: TaskUnit, unit: TaskUnit, why: DmscError) -> None:
        """The newcomer can't be started: the slot hosts the former unit again."""
        log.warning("move failed", job=self._job.name, sid=newcomer.sid, reason=str(why))
        self._changes.fail()
        if request.by_person:
            self.on_set(place_knob(newcomer.sid), None, request.by)
        self._job.events.fault(f"{newcomer.sid}: {why}; {unit.sid} comes back")
        self._job.instances.members.pop(newcomer.sid, None)
        self._swap(newcomer, unit)
        self._joining.bring(unit.sid)

    def _swap(self, out: TaskUnit, into: TaskUnit) -> None:
        """Gives the slot of unit `out` to unit `into`."""
        graph = self._job.instances.graph
        place = graph.placement(out.sid).model_copy(update={"sid": into.sid})
        graph = with_units(without_units(graph, {out.sid}), (into,))
        self._job.instances.graph = graph.model_copy(update={"placements": (*graph.placements, place)})
