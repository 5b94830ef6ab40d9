"""Moves of an instance from one stage to another, carried out when a step is decided.

The instance leaves its stage as a replica does that `scale` takes away: nothing of the next step is its own,
so nothing is lost. Its slot then hosts one of the other stage, a process forked anew, which takes the state
from a peer and joins like any newcomer. Which move may be made, and what became of it, is in `stage_moves`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bus.logs import get_logger
from entities.orchestrator.job_state.event_writer import EventWriter
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.membership.joining import JoiningMembers
from entities.orchestrator.membership.replacement import Replacement
from entities.orchestrator.planning.scaling import added_replicas, with_units, without_units
from entities.orchestrator.planning.stage_moves import StageMembers, StageMoves, in_words
from entities.orchestrator.step.step_owner import StepOwner
from schemas.errors import Conflict, DmscError
from schemas.job import StepResult
from schemas.stage_move import MoveForecast, StageMove
from schemas.step import Member
from schemas.task_graph import TaskUnit

log = get_logger("orchestrator")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveRequest:
    """What was asked for and not begun yet. `forecast`: None where a person ordered it."""

    sid: str
    stage: int
    by: str
    forecast: MoveForecast | None


class Rebalancing:
    """One job's. `part_with` has a member leave that nothing of the next step is owned by."""

    def __init__(
        self,
        instances: JobInstances,
        replacement: Replacement,
        joining: JoiningMembers,
        step_owner: StepOwner,
        events: EventWriter,
        tasks: GuardedTasks,
        part_with: Callable[[Member], None],
        moves: StageMoves,
        *,
        allowed: bool,
    ) -> None:
        self._instances = instances
        self._replacement = replacement
        self._joining = joining
        self._step_owner = step_owner
        self._events = events
        self._tasks = tasks
        self._part_with = part_with
        self._moves = moves
        self._allowed = allowed
        self._wish: MoveRequest | None = None
        self.under_way = ""
        """Who is leaving for another stage, until the newcomer is one of the job's units; else ''."""

    def ask(self, sid: str, stage: int, by: str, forecast: MoveForecast | None = None) -> str:
        """Has an instance change its stage once the open step is decided; returns that in words.

        Args:
            sid: which one.
            stage: where to.
            by: who wants it.
            forecast: what a policy expects of it; None: a person wants it, whatever it brings.

        Raises:
            Conflict: why not.
        """
        why = self._obstacle(sid, stage)
        if not why and forecast is not None:
            why = self._moves.unwise(sid, stage, forecast, self._crew())
            if not self._allowed:
                why = "the job says parallel.rebalance: false"
        if not why and self._wish is not None:
            why = f"{self._wish.sid} is about to move to stage {self._wish.stage}"
        if why:
            raise Conflict(f"{sid} does not move to stage {stage}: {why}")
        self._wish = MoveRequest(sid=sid, stage=stage, by=by, forecast=forecast)
        return f"{sid} will leave for stage {stage} at the end of this step"

    def decided(self, result: StepResult) -> None:
        """A step is: it is taken into account, and whoever is to move may."""
        news = self._moves.decided(result, last=self._step_owner.at_end)
        if news is not None:
            self._tell(news)
        wish, self._wish = self._wish, None
        if wish is None or self._step_owner.at_end:
            return
        why = self._obstacle(wish.sid, wish.stage)
        if why:
            log.info("move dropped", job=self._step_owner.job, sid=wish.sid, stage=wish.stage, reason=why)
            return
        self._begin(wish)

    def disturbed(self) -> None:
        """Something else changed who works: what steps take now says nothing of a move before."""
        news = self._moves.undo()
        if news is not None:
            self._tell(news)

    def _obstacle(self, sid: str, stage: int) -> str:
        if not self._step_owner.running:
            return "the job is being brought back"
        why = self._moves.impossible(sid, stage, self._crew())
        if not why and not self._replacement.is_open(sid):
            why = f"{sid}'s slot is cordoned, or its node is not there"
        return why

    def _crew(self) -> StageMembers:
        """Living members by stage, as they work."""
        graph = self._instances.graph
        assert graph is not None
        standbys = frozenset(unit.sid for unit in graph.units if unit.standby)
        return StageMembers(
            working={
                stage: [one.sid for one in members if one.sid not in standbys]
                for stage, members in enumerate(self._step_owner.stages)
            },
            standbys=standbys,
            coming=tuple(sorted(self._joining.coming)),
        )

    def _begin(self, wish: MoveRequest) -> None:
        graph = self._instances.graph
        assert graph is not None
        member, unit = self._instances.members[wish.sid], graph.unit(wish.sid)
        working = sum(not one.standby for one in graph.stage(wish.stage))
        (newcomer,) = added_replicas(graph, wish.stage, working + 1)
        move = self._moves.begin(
            StageMove(
                sid=wish.sid,
                newcomer=newcomer.sid,
                from_stage=unit.stage,
                to_stage=wish.stage,
                step=self._step_owner.step,
                by=wish.by,
                forecast=wish.forecast,
            )
        )
        self._tell(move)
        self.under_way = wish.sid
        self._part_with(member)
        self._tasks.spawn(self._rehost(member, unit, newcomer))

    async def _rehost(self, member: Member, unit: TaskUnit, newcomer: TaskUnit) -> None:
        """The slot hosts the newcomer once nothing is left of the member; until then the record has that one.

        So an orchestrator that takes over finds the one or the other, and brings who is missing.
        """
        await self._replacement.end(member)
        self._swap(unit, newcomer)
        self.under_way = ""
        if self._instances.members.get(member.sid) == member:
            del self._instances.members[member.sid]
        self._events.changed(f"{newcomer.sid} takes the place of {member.sid}")
        await self._events.told()  # the record names the newcomer before it lives
        await self._replacement.until_free(newcomer)
        self._joining.bring(newcomer.sid, given_up=lambda why: self._go_back(newcomer, unit, why))

    def _go_back(self, newcomer: TaskUnit, unit: TaskUnit, why: DmscError) -> None:
        """The other stage can't be started there: the slot hosts the first one again."""
        log.warning("move failed", job=self._step_owner.job, sid=newcomer.sid, reason=str(why))
        news = self._moves.fail()
        if news is not None:
            self._tell(news)
        self._events.fault(f"{newcomer.sid}: {why}; {unit.sid} comes back")
        self._instances.members.pop(newcomer.sid, None)
        self._swap(newcomer, unit)
        self._joining.bring(unit.sid)

    def _swap(self, out: TaskUnit, into: TaskUnit) -> None:
        """One unit's slot is another's."""
        graph = self._instances.graph
        assert graph is not None
        place = graph.placement(out.sid).model_copy(update={"sid": into.sid})
        graph = with_units(without_units(graph, {out.sid}), (into,))
        self._instances.graph = graph.model_copy(update={"placements": (*graph.placements, place)})

    def _tell(self, move: StageMove) -> None:
        log.info("rebalancing", job=self._step_owner.job, move=in_words(move))
        self._events.moved(move, self._moves.kept)
