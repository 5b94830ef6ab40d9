"""The instances of one job: starts them in their slots, waits for them, and gives them orders."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from bus.connection import Bus
from bus.subject_row import Reply, Request, Subject
from bus.subjects import START_INSTANCE, STOP_INSTANCE
from bus.wire.request_progress import RequestProgress
from entities.orchestrator.job_state.job_secrets import secrets_for
from entities.orchestrator.job_state.link_secret import link_secret
from entities.orchestrator.mesh.mesh_view import MeshView, unless
from entities.orchestrator.transaction.reduction_layout import ReductionLayouts
from schemas.cluster import InstanceStart, InstanceStop
from schemas.errors import DeadlineExceeded, DmscError, NoResponders, Unavailable
from schemas.job import JobRecord, JobSpec, LiveInstanceView
from schemas.limits import SLOWEST_BYTES_PER_S
from schemas.registry import PASSING, READY, SILENT, InstanceState
from schemas.step import Member
from schemas.task_graph import Placement, TaskGraph, TaskUnit, is_before_entry
from schemas.urls import BUS, local_path


class MemberLost(DmscError):
    """Members of the job are lost."""

    code = "member_lost"
    retryable = True

    def __init__(self, members: Iterable[Member], text: str) -> None:
        super().__init__(text)
        self.members = set(members)


class NotReady(DmscError):
    """Instances that were started are not ready, through no fault of their own; another start may succeed."""

    code = "not_ready"
    retryable = True

    def __init__(self, members: Iterable[Member], text: str) -> None:
        super().__init__(text)
        self.members = tuple(members)


class _LostInstance(Unavailable):
    """The member was marked lost while its answer was awaited."""

    code = "lost"


class StartFailed(DmscError):
    """An instance ended before it was ready; the text is the reason that it gave."""

    code = "start_failed"

    def __init__(self, member: Member, text: str) -> None:
        super().__init__(text)
        self.member = member


class NodeLost(DmscError):
    """A node that was to run instances does not do so; `agent` is the SID of its agent, if that is known."""

    code = "node_lost"
    retryable = True

    def __init__(self, agent: str | None, text: str) -> None:
        super().__init__(text)
        self.agent = agent


@dataclass(frozen=True, kw_only=True)
class InstanceTimes:
    """How long instances and their agents may take, in seconds."""

    start_s: float = 20.0
    """An agent answers within milliseconds; this covers one that restarts."""
    no_progress_s: float = 120.0
    """Without any of it, what gets ready, or moves a stage's state in pieces, counts as stuck; with it, it
    may take for ever. A dead instance is noticed long before."""


class JobInstances:
    """The instances that run the job's units. `members` maps SID to the incarnation that counts.

    `deployed`: the graph of the present deployment; None while there is none. `record` names the job, its
    spec and its epoch.
    """

    def __init__(
        self, bus: Bus, mesh: MeshView, record: JobRecord, times: InstanceTimes = InstanceTimes()
    ) -> None:
        self._times = times
        self._bus = bus
        self._mesh = mesh
        self._record = record
        self.deployed: TaskGraph | None = None
        self.members: dict[str, Member] = {}
        self.lost: set[Member] = set()
        self._loss = asyncio.Event()
        self._link_secret = ""
        self.layouts = ReductionLayouts()

    def settle(self, spec: JobSpec) -> None:
        """Instances that start from now on get the job as it was fixed by its analysis."""
        self._record = self._record.model_copy(update={"spec": spec})

    def mark_lost(self, member: Member) -> None:
        """Marks an incarnation that no longer counts; nobody waits for its answers any more."""
        self.lost.add(member)
        self._loss.set()
        self._loss = asyncio.Event()

    def is_present(self, member: Member) -> bool:
        """Whether it is the present incarnation of its unit, and not lost."""
        return self.members.get(member.sid) == member and member not in self.lost

    def is_before_entry(self, member: Member) -> bool:
        """Whether it is no member of the step transaction: it makes samples when it is asked for them."""
        return any(unit.sid == member.sid and is_before_entry(unit.stage) for unit in self.units)

    async def _until_lost(self, member: Member) -> None:
        while member not in self.lost:
            await self._loss.wait()

    @property
    def graph(self) -> TaskGraph:
        """The graph of the present deployment, which must exist."""
        assert self.deployed is not None, f"job {self._record.job} is not deployed"
        return self.deployed

    @graph.setter
    def graph(self, graph: TaskGraph) -> None:
        self.deployed = graph

    @property
    def units(self) -> tuple[TaskUnit, ...]:
        return self.graph.units

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where its units run, or are to run; empty before the deployment."""
        return () if self.deployed is None else self.deployed.placements

    def slot_memory(self) -> dict[str, int]:
        """Bytes of the slot in which each unit is placed; 0: not known."""
        found = {}
        for place in self.placements:
            node = self._mesh.nodes.get(self._mesh.agent_of(place.cluster, place.node) or "")
            slot = None if node is None else node.slot(place.slot)
            found[place.sid] = 0 if slot is None else slot.memory_bytes
        return found

    def agent_of(self, sid: str) -> str | None:
        """The SID of the agent of a unit's node, if that is registered."""
        place = self.graph.placement(sid)
        return self._mesh.agent_of(place.cluster, place.node)

    def stages(self) -> tuple[tuple[Member, ...], ...]:
        """Members of each stage, in replica order."""
        count = 1 + max(unit.stage for unit in self.units)
        return tuple(
            tuple(self.members[unit.sid] for unit in self.graph.stage(stage) if unit.sid in self.members)
            for stage in range(count)
        )

    @property
    def expected_ms(self) -> float:
        """Milliseconds that one microbatch takes through all stages, by the analysis."""
        return sum({unit.stage: unit.requirements.cost_ms for unit in self.units}.values())

    def patience_s(self, least_s: float, *, times: float = 1.0) -> float:
        """Deadline of an order that moves a stage's whole state `times` times: `least_s` for a small one."""
        state_bytes = max((unit.requirements.memory_bytes for unit in self.units), default=0)
        return least_s + times * state_bytes / SLOWEST_BYTES_PER_S

    def idle_s(self, url: str) -> float:
        """How long an order that moves a stage's state from or to `url` may go without progress.

        Files of this machine and of the bus are moved in pieces that are counted; of other stores' drivers
        only some say how far they are, so that a whole file may be one piece.
        """
        in_pieces = url.startswith(BUS) or local_path(url) is not None
        return self._times.no_progress_s if in_pieces else self.patience_s(self._times.no_progress_s)

    def stage_members(self) -> list[Member]:
        """The members of stages that are not lost."""
        return [member for members in self.stages() for member in members if member not in self.lost]

    def present(self) -> list[Member]:
        """All members that are not lost, data instances too."""
        return [member for member in self.members.values() if member not in self.lost]

    async def start(self, units: Iterable[TaskUnit], *, joins: bool = False) -> list[Member]:
        """Starts a new incarnation of each unit in its slot and waits until all are ready.

        Args:
            joins: the job runs already; the instances become active when a reduction group admits them.

        Raises:
            StartFailed: an instance refused or died; the text is its own reason.
            NodeLost: a node died before its instances were ready.
            NotReady: an instance makes no progress, or ended because the bus or others were missing.
            Unavailable: the bus does not answer; nothing was started.
        """
        self._link_secret = self._link_secret or await link_secret(self._bus, self._record.job)
        named = await secrets_for(self._bus, self._record.spec)
        orders = [asyncio.create_task(self._start(unit, joins, named)) for unit in units]
        await asyncio.gather(
            *orders, return_exceptions=True
        )  # all that started are among the members, even if one fails
        started = [order.result() for order in orders]
        await self._until_ready(started)
        return started

    async def _start(self, unit: TaskUnit, joins: bool, named: str) -> Member:
        """`named`: the secrets that the job's URLs name."""
        place = self.graph.placement(unit.sid)
        # since it was asked for, the job may have been cut anew
        unit = next((other for other in self.graph.units if other.sid == unit.sid), unit)
        member = Member(sid=unit.sid, incarnation=secrets.token_hex(6))
        order = InstanceStart(
            job=self._record.job,
            epoch=self._record.epoch,
            spec=self._record.spec,
            unit=unit,
            incarnation=member.incarnation,
            slot=place.slot,
            stages=self._record.spec.parallel.stages,
            layer_count=self.graph.layer_count,
            code_digest=self.graph.code_digest,
            compiler=self.graph.compiler,
            data_digest=self.graph.data_digest,
            inexact=bool(self.graph.inexact),
            batch=self.graph.batch,
            joins=joins,
            link_secret=self._link_secret,
            secrets=named,
            user=self._record.user,
            plan=self.graph.revision,
        )
        code = self._record.spec.code
        agent = self.agent_of(unit.sid)
        if agent is None:
            raise NodeLost(None, f"node {place.node} of cluster {place.cluster} is not there")
        try:
            started = self._bus.command(
                START_INSTANCE,
                order,
                # the first instance of a job on a node waits for the job's code
                deadline_s=self._times.start_s + (code.bytes / SLOWEST_BYTES_PER_S if code else 0.0),
                while_heard=True,
                agent=agent,
                seal_to=self._mesh.nodes[agent].sealing_key,
            )
            await self._mesh.while_there(agent, started)
        except Unavailable as error:
            raise NodeLost(agent, f"node {place.node} of cluster {place.cluster}: {error.text}") from None
        self.members[unit.sid] = member
        return member

    def _ready(self, member: Member) -> bool:
        record = self._mesh.last_of(member)
        if record is None or record.state in (InstanceState.FAULTED, InstanceState.GONE):
            return False
        return record.state is InstanceState.ACTIVE or record.reason == READY

    async def _until_ready(self, members: Iterable[Member]) -> None:
        waiting = list(members)
        over = (InstanceState.FAULTED, InstanceState.GONE)

        def ended(member: Member) -> bool:
            record = self._mesh.last_of(member)
            return record is not None and record.state in over

        def orphaned(member: Member) -> bool:
            return not self._ready(member) and self.agent_of(member.sid) is None

        def settled() -> bool:
            return any(ended(member) or orphaned(member) for member in waiting) or all(
                self._ready(member) for member in waiting
            )

        def reports() -> list[str | None]:
            """The progress that each instance reports (`workers.stage.startup_progress`)."""
            records = [self._mesh.last_of(member) for member in waiting]
            return [None if record is None else record.reason for record in records]

        def has_progressed(before: list[str | None]) -> bool:
            return settled() or reports() != before

        progress = True
        while progress and not settled():
            progress = await self._mesh.until(partial(has_progressed, reports()), self._times.no_progress_s)
        for member in waiting:
            record = self._mesh.last_of(member)
            reason = (record.reason if record else "") or "ended before it was ready"
            if orphaned(member):
                raise NodeLost(None, f"{member.sid}: its node has left the mesh")
            if ended(member) and reason.startswith(SILENT):
                raise NodeLost(self.agent_of(member.sid), f"{member.sid}: {reason}")
            if ended(member) and reason.startswith(PASSING):
                raise NotReady([member], f"{member.sid}: {reason}")
            if ended(member):
                raise StartFailed(member, f"{member.sid}: {reason}")
        if not progress:
            late = [member for member in waiting if not self._ready(member)]
            names = ", ".join(member.sid for member in late)
            raise NotReady(late, f"{names} not ready, and no progress for {self._times.no_progress_s:.0f} s")

    async def order(
        self,
        row: Subject[Request, Reply],
        message: Request,
        members: Iterable[Member],
        *,
        deadline_s: float,
        moving: RequestProgress | bool = False,
    ) -> dict[str, Reply]:
        """Gives the same order to several members and returns their answers by SID.

        With `moving` each has `deadline_s` from its last progress on (`bus.wire.request_progress`); with
        a `RequestProgress`, from the last of any order that has the same.

        Raises:
            MemberLost: some did not answer; the order may be repeated to all, for orders are idempotent.
        """
        targets = list(members)

        async def order_one(member: Member) -> Reply:
            request = self._bus.command(
                row,
                message,
                deadline_s=deadline_s,
                while_heard=True,
                moving=RequestProgress() if moving is True else moving or None,
                job=self._record.job,
                sid=member.sid,
            )
            return await unless(request, self._until_lost(member), _LostInstance(f"{member.sid} was lost"))

        answers = await asyncio.gather(*(order_one(member) for member in targets), return_exceptions=True)
        silent = []
        problems = []
        answered: dict[str, Reply] = {}
        for member, answer in zip(targets, answers, strict=True):
            # an instance that could not reach a store or the bus has answered: that is no sign of its death
            if _is_silence(answer):
                silent.append(member)
                problems.append(f"{member.sid}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answered[member.sid] = answer
        if silent:
            raise MemberLost(silent, f"no answer to {row.name}: {'; '.join(problems)}")
        return answered

    async def stop(self, *, now: bool = False) -> None:
        """Ends every instance of the job. Without its agent an instance has ended already."""
        if self.deployed is None:
            return

        async def stop_one(member: Member) -> None:
            agent = self.agent_of(member.sid)
            if agent is None:
                return
            order = InstanceStop(
                job=self._record.job, sid=member.sid, incarnation=member.incarnation, now=now
            )
            await self._bus.command(STOP_INSTANCE, order, deadline_s=10.0, while_heard=True, agent=agent)

        members = [
            member
            for member in self.members.values()
            if self._mesh.state_of(member) is not InstanceState.GONE
        ]
        self.members.clear()
        await asyncio.gather(*(stop_one(member) for member in members), return_exceptions=True)

    def views(self) -> tuple[LiveInstanceView, ...]:
        """The job's instances for the live view."""
        if self.deployed is None:
            return ()
        shown = []
        for unit in self.units:
            place = self.graph.placement(unit.sid)
            member = self.members.get(unit.sid)
            state = self._mesh.state_of(member) if member else None
            shown.append(
                LiveInstanceView(
                    sid=unit.sid,
                    role=str(unit.kind),
                    stage=unit.stage,
                    cluster=place.cluster,
                    node=place.node,
                    state=str(state or "starting"),
                    device=place.device,
                    standby=unit.standby,
                )
            )
        return tuple(shown)


def _is_silence(answer: object) -> bool:
    """Whether the member itself did not answer; an error about others is an answer."""
    if isinstance(answer, (NoResponders, DeadlineExceeded)):
        return not answer.answered
    return isinstance(answer, _LostInstance)
