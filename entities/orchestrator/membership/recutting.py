"""Gives the stages of a job that trains other layers (ADR-0090).

Members build and copy while training goes on. Then training rests at a boundary; they complete what they
have built, the job's record is written with the new graph, which is the commit point, and they go over to it.
Until that write anything that disturbs it drops it: nothing has changed. After it a loss is one under the new
plan.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from bus.logs import get_logger
from bus.subjects import RECUT_DROP, RECUT_FILL, RECUT_PREPARE, RECUT_SEND, RECUT_SWITCH
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.membership.measured_speeds import MeasuredSpeeds
from entities.orchestrator.membership.recut_plan import (
    InstancePace,
    RecutProposal,
    RecutQuestion,
    Transfers,
    transfers,
)
from entities.orchestrator.planning.plan_requests import speed_of
from entities.orchestrator.planning.task_graph import reference_ms
from entities.orchestrator.recovery.joining import JoiningMembers
from entities.orchestrator.step.member_orders import MemberOrders
from entities.orchestrator.step.step_owner import StepOwner
from entities.orchestrator.transaction.step_events import in_order
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.errors import Conflict, DmscError, Fenced
from schemas.recut import (
    Cuts,
    RecutAnswer,
    RecutDrop,
    RecutFill,
    RecutJob,
    RecutPrepare,
    RecutRecord,
    RecutSend,
    RecutState,
    RecutSwitch,
    cuts_text,
)
from schemas.step import Member, MicrobatchClaim
from schemas.task_graph import ModelTopology, TaskGraph

log = get_logger("orchestrator")

KEPT = 16
"""Re-cuts that a job's record remembers: the latest."""


@dataclass(slots=True)
class OpenRecut:
    """A re-cut that is under way. `crew`: the members that it was made for, by stage."""

    record: RecutRecord
    graph: TaskGraph
    crew: tuple[tuple[Member, ...], ...]
    transfers: dict[Member, Transfers]
    began: float
    is_ready: bool = False

    @property
    def members(self) -> list[Member]:
        return [member for members in self.crew for member in members]


class Recutting:
    """The re-cuts of one job.

    Args:
        job: The job.
        step_owner: Its open step.
        joining: Members on their way; while somebody is, nothing is cut.
        reopen: Opens the step again with those that go on.
        losing: Reports members that do not answer.
        ready: Called once training has to rest for the switch.
        changed: Called once another plan is in force: what was known of the former one is forgotten.
        departing: Who is about to leave its stage, in words; empty: nobody.
    """

    def __init__(
        self,
        job: JobContext,
        step_owner: StepOwner,
        joining: JoiningMembers,
        reopen: Callable[[ResumePoint], Awaitable[None]],
        losing: Callable[[Sequence[Member], str], None],
        ready: Callable[[], None],
        changed: Callable[[], None],
        departing: Callable[[], str] = lambda: "",
    ) -> None:
        self._job = job
        self._departing = departing
        self._times = job.times.recut
        self._step_owner = step_owner
        self._joining = joining
        self._reopen = reopen
        self._losing = losing
        self._ready = ready
        self._changed = changed
        self._orders = MemberOrders(job)
        self.measured = MeasuredSpeeds()
        """What stages and steps take now."""
        self._open: OpenRecut | None = None
        self._records = job.store.record.recuts
        self.on_in_force: Callable[[RecutRecord], None] = lambda record: None
        """Called with each re-cut whose plan is in force now."""
        self.on_dropped: Callable[[RecutRecord], None] = lambda record: None
        """Called with each one that was given up before that."""

    # --- asking -----------------------------------------------------------------------------------------
    @property
    def under_way(self) -> str:
        """The re-cut that is open, in words; empty: there is none."""
        if self._open is None:
            return ""
        record = self._open.record
        return f"plan {record.plan} ({cuts_text(record.cuts)}) is being prepared, as {record.by} wanted"

    @property
    def needs_rest(self) -> bool:
        """Whether training has to rest for it."""
        return self._open is not None and self._open.is_ready

    def question(
        self, message: RecutJob, topology: ModelTopology, took_ms: Mapping[Member, float] | None = None
    ) -> RecutQuestion:
        """What `recut_proposal` goes by. That takes long for thousands of layers, and may run on any thread.

        Raises:
            Conflict: a re-cut is impossible now; the text says why.
        """
        self._check_possible(message)
        graph, nodes = self._job.instances.graph, self._job.mesh.nodes
        return RecutQuestion(
            job=self._job.name,
            graph=graph,
            spec=self._job.spec,
            topology=topology,
            cuts=message.cuts,
            plan=self._next_plan(),
            paces=self._paces(graph, took_ms),
            step_ms=self.measured.step_ms,
            node_of={
                unit.sid: nodes[agent]
                for unit in graph.units
                if (agent := self._job.instances.agent_of(unit.sid)) in nodes
            },
        )

    def begin(self, message: RecutJob, proposal: RecutProposal) -> RecutAnswer:
        """Begins what was proposed, unless it is a dry run.

        Raises:
            Conflict: it has become impossible, or the job's instances have changed meanwhile.
        """
        self._check_possible(message)
        if proposal.before is not self._job.instances.graph or proposal.graph.revision != self._next_plan():
            raise Conflict(
                f"job {self._job.name} is not cut anew: its instances have just changed; ask again"
            )
        if not message.dry_run:
            self._begin(proposal.graph, proposal.answer.cuts, message.user)
        return proposal.answer_to(message)

    def _next_plan(self) -> int:
        """The revision of the next plan: above that of one that was dropped, too."""
        return 1 + max([self._job.instances.graph.revision, *(record.plan for record in self._records)])

    def _check_possible(self, message: RecutJob) -> None:
        graph = self._job.instances.graph
        why = ""
        if self._open is not None:
            why = f"{self.under_way}: ask again when it is in force"
        elif not self._step_owner.running:
            why = "the job is being brought back: ask again in a moment"
        elif message.revision is not None and message.revision != graph.revision:
            why = f"plan {message.revision} was seen, and plan {graph.revision} is in force: look again"
        elif missing := self.missing():
            why = f"{', '.join(missing)} must have joined first"
        elif departing := self._departing():
            why = f"{departing}: ask again in a moment"
        elif len(graph.cuts) < 2:
            why = "it runs in one stage, which has all layers"
        if why:
            raise Conflict(f"job {self._job.name} is not cut anew: {why}")

    def missing(self) -> list[str]:
        """Units of stages that do not work now, or are on their way."""
        if not self._step_owner.running:
            return ["all"]
        working = {member.sid for members in self._step_owner.stages for member in members}
        lacking = {unit.sid for unit in self._job.instances.units if not unit.is_data} - working
        return sorted(lacking | set(self._joining.coming))

    def _paces(self, graph: TaskGraph, took_ms: Mapping[Member, float] | None) -> list[list[InstancePace]]:
        """What each working instance shows now, by stage, and what its slot is said to do."""
        measured = self.measured.microbatch_ms if took_ms is None else took_ms
        return [
            [
                InstancePace(measured.get(member) or 0.0, self._slot_speed(member))
                for member in members
                if not graph.unit(member.sid).standby
            ]
            for members in self._step_owner.stages
        ]

    def _slot_speed(self, member: Member) -> float:
        where = self._job.instances.graph.placement(member.sid)
        node = self._job.mesh.nodes.get(self._job.instances.agent_of(member.sid) or "")
        slot = None if node is None else node.slot(where.slot)
        return 1.0 if slot is None else speed_of(slot)

    # --- preparing --------------------------------------------------------------------------------------
    def _begin(self, graph: TaskGraph, cuts: Cuts, by: str) -> None:
        crew = self._step_owner.stages
        before = self._job.instances.graph.cuts
        self._open = OpenRecut(
            record=RecutRecord(
                plan=graph.revision, by=by, before=before, cuts=cuts, step=self._step_owner.step
            ),
            graph=graph,
            crew=crew,
            transfers=transfers(crew, before, cuts),
            began=time.monotonic(),
        )
        self._tell(self._open.record)
        self._job.tasks.spawn(self._prepare(self._open))

    async def _prepare(self, recut: OpenRecut) -> None:
        """Has members build, then copy until all have caught up; then training rests for the switch."""
        try:
            moved = await self._copied(recut)
        except Fenced:
            raise
        except DmscError as error:
            await self._drop(recut, error.text)
            return
        if self._open is recut:
            took = time.monotonic() - recut.began
            recut.record = recut.record.model_copy(update={"moved_bytes": moved, "copy_s": took})
            recut.is_ready = True
            self._ready()

    async def _copied(self, recut: OpenRecut) -> int:
        patience_s = self._job.instances.patience_s(self._times.build_s)
        job, epoch, plan = self._job.name, self._job.epoch, recut.record.plan
        order = self._job.instances.order

        async def build(member: Member) -> None:
            share = recut.transfers[member]
            prepare = RecutPrepare(
                job=job,
                epoch=epoch,
                plan=plan,
                unit=recut.graph.unit(member.sid),
                takes=tuple(share.takes),
                gives=tuple(share.gives),
            )
            await order(RECUT_PREPARE, prepare, [member], deadline_s=patience_s)

        await asyncio.gather(*(build(member) for member in recut.members))
        send = RecutSend(job=job, epoch=epoch, plan=plan)

        async def copy(giver: Member) -> int:
            while True:
                answers = await order(RECUT_SEND, send, [giver], deadline_s=self._times.send_s)
                answer = answers[giver.sid]
                if answer.slow:
                    raise Conflict(f"what {giver.sid} gives does not keep up with the steps")
                if answer.version >= 0:
                    return answer.bytes

        givers = [member for member in recut.members if recut.transfers[member].gives]
        return sum(await asyncio.gather(*(copy(giver) for giver in givers)))

    async def _drop(self, recut: OpenRecut, why: str) -> None:
        """Gives it up before its commit point: members forget it."""
        if self._open is not recut:
            return
        self._open = None
        self._tell(recut.record.model_copy(update={"state": RecutState.DROPPED, "why": why}))
        self.on_dropped(recut.record)
        drop = RecutDrop(job=self._job.name, epoch=self._job.epoch, plan=recut.record.plan)
        living = [member for member in recut.members if member not in self._job.instances.lost]

        async def forget(member: Member) -> None:
            try:
                await self._job.instances.order(RECUT_DROP, drop, [member], deadline_s=self._times.drop_s)
            except Fenced:
                raise
            except DmscError as error:  # it forgets it when the next one is prepared, or a leader adopts it
                log.info("plan not dropped", job=self._job.name, sid=member.sid, reason=str(error))

        await asyncio.gather(*(forget(member) for member in living))

    def _overtaken(self, recut: OpenRecut) -> str:
        """What has changed among the members since it began, in words; empty: nothing."""
        if missing := self.missing():
            return f"{', '.join(missing)} left, or is on its way"
        if self._step_owner.stages != recut.crew:
            return "the members of a stage have changed"
        return ""

    # --- reports of the training --------------------------------------------------------------------------
    def decided(self, claims: Sequence[MicrobatchClaim], step_s: float) -> None:
        """A step was decided."""
        self.measured.decided(claims, step_s, time.monotonic())
        recut = self._open
        if recut is not None and (why := self._overtaken(recut)):
            self._job.tasks.spawn(self._drop(recut, why))

    def taken_over(self) -> None:
        """What an earlier orchestrator had not brought to its commit point is dropped."""
        for record in self._records:
            if record.state is RecutState.PREPARING:
                why = "another orchestrator leads"
                self._tell(record.model_copy(update={"state": RecutState.DROPPED, "why": why}))

    def ended(self, why: str) -> tuple[RecutRecord, ...]:
        """Training ends: what is being prepared never comes into force. Returns the records."""
        self._open = None
        for record in self._records:
            if record.state is RecutState.PREPARING:
                self._note(record.model_copy(update={"state": RecutState.DROPPED, "why": why}))
        return self._records

    def disturbed(self, why: str) -> None:
        """All go back, or another loop opens: what is being prepared is dropped."""
        self.measured.forget()
        if self._open is not None:
            self._job.tasks.spawn(self._drop(self._open, why))

    # --- the switch -------------------------------------------------------------------------------------
    async def at_rest(self) -> None:
        """Goes over to the plan that is ready, if one is.

        Raises:
            MemberLost: a member died before the commit point; nothing has changed.
            StageGone: after it, a stage has no member; the checkpoint brings it back under the new plan.
        """
        recut = self._open
        if recut is None or not recut.is_ready:
            return
        began = time.monotonic()
        why = self._overtaken(recut) or await self._filled(recut) or self._overtaken(recut)
        if why:
            await self._drop(recut, why)
            return
        update = {"state": RecutState.DONE, "step": self._step_owner.step}
        done = recut.record.model_copy(update=update)
        # From here on whoever starts has the layers of the new graph; no await before the write begins.
        self._job.instances.graph = _placed(recut.graph, self._job.instances.graph)
        self._note(done)
        write = self._job.store.note(now=True, graph=self._job.instances.graph, recuts=self._records)
        await self._job.tasks.unless_failed(write)
        self._open = None
        self._tell(done)  # at once: whoever dies while members go over is lost under this plan
        self._job.events.changed(f"plan {done.plan} is in force: {cuts_text(done.cuts)}")
        try:
            await self._switch(recut)
        finally:
            self._note(done.model_copy(update={"pause_s": time.monotonic() - began}))
            self._job.events.recuts(self._records)

    async def _filled(self, recut: OpenRecut) -> str:
        """Has members complete what they have built; returns why that failed, or ''."""
        fill = RecutFill(
            job=self._job.name,
            epoch=self._job.epoch,
            plan=recut.record.plan,
            version=self._step_owner.step,
        )
        patience_s = self._job.instances.patience_s(self._times.fill_s)
        order = self._job.instances.order(RECUT_FILL, fill, recut.members, deadline_s=patience_s)
        try:
            await self._job.tasks.unless_failed(self._step_owner.loop.beside(order))
        except Fenced:
            raise
        except DmscError as error:
            return error.text
        return ""

    async def _switch(self, recut: OpenRecut) -> None:
        """Closes the step loop, has members go over, and opens it with those that did."""
        closed = await self._step_owner.close()
        going = self._step_owner.living(closed)
        fenced = in_order(self._job.instances.lost)
        switch = RecutSwitch(
            job=self._job.name,
            epoch=self._job.epoch,
            step=closed.step,
            attempt=closed.attempt,
            plan=recut.record.plan,
            fenced=fenced,
        )

        async def go_over(member: Member) -> None:
            try:
                await self._job.instances.order(
                    RECUT_SWITCH, switch, [member], deadline_s=self._times.switch_s
                )
            except Fenced:
                raise
            except DmscError as error:
                self._silent(member, error)

        orders = [go_over(member) for members in going.stages for member in members]
        data = self._orders.abort(
            going.data, step=closed.step, attempt=closed.attempt, fenced=fenced, on_silent=self._silent
        )
        await self._job.tasks.unless_failed(asyncio.gather(*orders, data))
        self.measured.forget()
        self._changed()
        self.on_in_force(recut.record)
        graph = self._job.instances.graph
        self._job.policies.refer(
            f"plan {recut.record.plan}: {cuts_text(recut.record.cuts)}",
            {stage: reference_ms(graph, stage) for stage in range(len(recut.record.cuts))},
        )
        await self._reopen(self._step_owner.living(going))

    def _silent(self, member: Member, error: DmscError) -> None:
        log.warning("member lost: it did not go over", job=self._job.name, sid=member.sid, reason=str(error))
        self._losing([member], f"plan change: {error.text}")

    def _note(self, record: RecutRecord) -> None:
        others = tuple(other for other in self._records if other.plan != record.plan)
        self._records = (*others, record)[-KEPT:]

    def _tell(self, record: RecutRecord) -> None:
        self._note(record)
        log.info(
            "re-cut",
            job=self._job.name,
            plan=record.plan,
            cuts=cuts_text(record.cuts),
            state=str(record.state),
            reason=record.why,
        )
        self._job.events.recut(record, self._records)


def _placed(graph: TaskGraph, present: TaskGraph) -> TaskGraph:
    """The new graph with the units and places that are there now: those of data come and go meanwhile."""
    cut = {unit.sid: unit for unit in graph.units}
    units = tuple(cut.get(unit.sid, unit) for unit in present.units)
    update = {"units": units, "placements": present.placements, "distances": present.distances}
    return graph.model_copy(update=update)
