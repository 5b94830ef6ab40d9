"""The instances of one job: starting them in their slots, waiting for them, giving them orders."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from functools import partial
from typing import Any

from bus.connection import Bus
from bus.subject import Subject
from bus.subjects import START_INSTANCE, STOP_INSTANCE
from bus.wire.request_progress import RequestProgress
from entities.orchestrator.job_state.job_secrets import secrets_for
from entities.orchestrator.job_state.link_secret import link_secret
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.base import Message
from schemas.cluster import InstanceStart, InstanceStop
from schemas.errors import DeadlineExceeded, DmscError, NoResponders, Unavailable
from schemas.job import JobSpec, LiveInstanceView
from schemas.registry import PASSING, READY, SILENT, InstanceState
from schemas.step import Member
from schemas.task_graph import TaskGraph, TaskUnit, UnitKind
from schemas.urls import BUS, local_path

START_DEADLINE_S = 20.0
"""An agent answers within milliseconds; this is enough for one that restarts."""

NO_PROGRESS_S = 120.0
"""An instance that starts, or moves a stage's state in pieces, counts as stuck after this time without
progress; with progress it may take any time. A dead instance is noticed long before."""
SLOWEST_BYTES_PER_S = 4e6
"""A transfer of a stage's state that is slower than this counts as stuck; instances use the same number."""


class MemberLost(DmscError):
    """Instances of the job did not answer, or were lost meanwhile."""

    code = "member_lost"
    retryable = True

    def __init__(self, members: Iterable[Member], text: str) -> None:
        super().__init__(text)
        self.members = set(members)


class NotReady(DmscError):
    """Started instances are not ready, through no fault of their own: another start may succeed."""

    code = "not_ready"
    retryable = True

    def __init__(self, members: Iterable[Member], text: str) -> None:
        super().__init__(text)
        self.members = tuple(members)


class _LostInstance(Unavailable):
    """The member was marked lost while an order waited for its answer."""

    code = "lost"


class StartFailed(DmscError):
    """An instance ended before it was ready; the text is the reason in its last record."""

    code = "start_failed"

    def __init__(self, member: Member, text: str) -> None:
        super().__init__(text)
        self.member = member


class NodeLost(DmscError):
    """A node that should run instances is gone or silent; `agent`: the SID of its agent, if known."""

    code = "node_lost"
    retryable = True

    def __init__(self, agent: str | None, text: str) -> None:
        super().__init__(text)
        self.agent = agent


class JobInstances:
    """The instances of one job. `members` maps each SID to the incarnation that counts."""

    def __init__(self, bus: Bus, mesh: MeshView, job: str, spec: JobSpec, epoch: int) -> None:
        self._bus = bus
        self._mesh = mesh
        self._job = job
        self._spec = spec
        self._epoch = epoch
        self.graph: TaskGraph | None = None
        self.members: dict[str, Member] = {}
        self.lost: set[Member] = set()
        self._lost_more = asyncio.Event()
        self._link_secret = ""

    def mark_lost(self, member: Member) -> None:
        """Marks that this incarnation no longer counts; orders that wait for its answer stop waiting."""
        self.lost.add(member)
        self._lost_more.set()
        self._lost_more = asyncio.Event()

    def is_present(self, member: Member) -> bool:
        """Whether it is the present incarnation of its unit, and not lost."""
        return self.members.get(member.sid) == member and member not in self.lost

    async def _until_lost(self, member: Member) -> None:
        while member not in self.lost:
            await self._lost_more.wait()

    @property
    def units(self) -> tuple[TaskUnit, ...]:
        assert self.graph is not None
        return self.graph.units

    def stages(self) -> tuple[tuple[Member, ...], ...]:
        """Members of each stage, in replica order."""
        assert self.graph is not None
        count = 1 + max(unit.stage for unit in self.units)
        return tuple(
            tuple(self.members[unit.sid] for unit in self.graph.stage(stage) if unit.sid in self.members)
            for stage in range(count)
        )

    @property
    def expected_ms(self) -> float:
        """Milliseconds of one microbatch through all stages, by the analysis."""
        return sum({unit.stage: unit.requirements.cost_ms for unit in self.units}.values())

    def patience_s(self, least_s: float, *, times: float = 1.0) -> float:
        """Deadline of an order that moves a stage's whole state `times` times; `least_s` for a small one."""
        state_bytes = max((unit.requirements.memory_bytes for unit in self.units), default=0)
        return least_s + times * state_bytes / SLOWEST_BYTES_PER_S

    def idle_s(self, url: str) -> float:
        """How long an order that moves a stage's state from or to `url` may make no progress.

        Files on a machine and on the bus are moved in pieces, each of which is progress. Only some drivers of
        other stores report progress, so that a whole file may be one piece.
        """
        in_pieces = url.startswith(BUS) or local_path(url) is not None
        return NO_PROGRESS_S if in_pieces else self.patience_s(NO_PROGRESS_S)

    def stage_members(self) -> list[Member]:
        """The members of stages that are not lost."""
        return [member for members in self.stages() for member in members if member not in self.lost]

    def present(self) -> list[Member]:
        """All members that are not lost, data instances included."""
        return [member for member in self.members.values() if member not in self.lost]

    async def start(self, units: Iterable[TaskUnit], *, joins: bool = False) -> list[Member]:
        """Starts a new incarnation of each unit in its slot and waits until all are ready.

        Args:
            units: the units to start.
            joins: the job runs already; the instances become active when a reduction group admits them.

        Raises:
            StartFailed: an instance refused or died; the text is its own reason.
            NodeLost: a node died before its instances were ready.
            NotReady: an instance makes no progress, or ended because the bus or others were unavailable.
            Unavailable: the bus does not answer; nothing was started.
        """
        self._link_secret = self._link_secret or await link_secret(self._bus, self._job)
        named = await secrets_for(self._bus, self._spec)
        orders = [asyncio.create_task(self._start(unit, joins, named)) for unit in units]
        await asyncio.gather(*orders, return_exceptions=True)  # all starts are known before one of them fails
        started = [order.result() for order in orders]
        await self._until_ready(started)
        return started

    async def _start(self, unit: TaskUnit, joins: bool, named: str) -> Member:
        """Starts one unit. `named`: the secrets that the job's URLs name."""
        assert self.graph is not None
        place = self.graph.placement(unit.sid)
        member = Member(sid=unit.sid, incarnation=secrets.token_hex(6))
        order = InstanceStart(
            job=self._job,
            epoch=self._epoch,
            spec=self._spec,
            unit=unit,
            incarnation=member.incarnation,
            slot=place.slot,
            stages=self._spec.parallel.stages,
            layer_count=self.graph.layer_count,
            code_digest=self.graph.code_digest,
            inexact=bool(self.graph.inexact),
            joins=joins,
            link_secret=self._link_secret,
            secrets=named,
        )
        agent = self._mesh.agent_of(place.cluster, place.node)
        if agent is None:
            raise NodeLost(None, f"node {place.node} of cluster {place.cluster} is not there")
        try:
            started = self._bus.command(
                START_INSTANCE,
                order,
                deadline_s=START_DEADLINE_S,
                while_heard=True,
                agent=agent,
                seal_to=self._mesh.nodes[agent].sealing_key,
            )
            await self._mesh.while_there(agent, started)
        except Unavailable as error:
            raise NodeLost(agent, f"node {place.node} of cluster {place.cluster}: {error.text}") from None
        self.members[unit.sid] = member
        return member

    def _node_of(self, member: Member) -> str | None:
        """The SID of the agent of its node, if that is registered."""
        assert self.graph is not None
        place = self.graph.placement(member.sid)
        return self._mesh.agent_of(place.cluster, place.node)

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
            return not self._ready(member) and self._node_of(member) is None

        def settled() -> bool:
            return any(ended(member) or orphaned(member) for member in waiting) or all(
                self._ready(member) for member in waiting
            )

        def progress() -> list[str | None]:
            """The progress that they report (`workers.stage.startup_progress`)."""
            records = [self._mesh.last_of(member) for member in waiting]
            return [None if record is None else record.reason for record in records]

        def goes_on(before: list[str | None]) -> bool:
            return settled() or progress() != before

        getting_on = True
        while getting_on and not settled():
            getting_on = await self._mesh.until(partial(goes_on, progress()), NO_PROGRESS_S)
        for member in waiting:
            record = self._mesh.last_of(member)
            reason = (record.reason if record else "") or "ended before it was ready"
            if orphaned(member):
                raise NodeLost(None, f"{member.sid}: its node has left the mesh")
            if ended(member) and reason.startswith(SILENT):
                raise NodeLost(self._node_of(member), f"{member.sid}: {reason}")
            if ended(member) and reason.startswith(PASSING):
                raise NotReady([member], f"{member.sid}: {reason}")
            if ended(member):
                raise StartFailed(member, f"{member.sid}: {reason}")
        if not getting_on:
            late = [member for member in waiting if not self._ready(member)]
            names = ", ".join(member.sid for member in late)
            raise NotReady(late, f"{names} not ready, and no progress for {NO_PROGRESS_S:.0f} s")

    async def order(
        self,
        row: Subject,
        message: Message,
        members: Iterable[Member],
        *,
        deadline_s: float,
        moving: RequestProgress | bool = False,
    ) -> dict[str, Any]:
        """Gives the same order to several members and returns their answers by SID.

        With `moving`, the deadline of each member is `deadline_s` after its last progress
        (`bus.wire.request_progress`). Orders that share one `RequestProgress` share their progress.

        Raises:
            MemberLost: some did not answer. The order can be repeated: it is idempotent.
        """
        targets = list(members)

        async def order_one(member: Member) -> Message:
            command = asyncio.create_task(
                self._bus.command(
                    row,
                    message,
                    deadline_s=deadline_s,
                    while_heard=True,
                    moving=RequestProgress() if moving is True else moving or None,
                    job=self._job,
                    sid=member.sid,
                )
            )
            loss = asyncio.create_task(self._until_lost(member))
            try:
                await asyncio.wait({command, loss}, return_when=asyncio.FIRST_COMPLETED)
                if command.done():
                    answer: Message = command.result()
                    return answer
                raise _LostInstance(f"{member.sid} was lost")
            finally:
                command.cancel()
                loss.cancel()

        answers = await asyncio.gather(*(order_one(member) for member in targets), return_exceptions=True)
        silent = []
        problems = []
        for member, answer in zip(targets, answers, strict=True):
            # an instance that could not reach something (a store, the bus) has answered: it lives
            if _is_silence(answer):
                silent.append(member)
                problems.append(f"{member.sid}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
        if silent:
            raise MemberLost(silent, f"no answer to {row.name}: {'; '.join(problems)}")
        return {member.sid: answer for member, answer in zip(targets, answers, strict=True)}

    async def stop(self, *, now: bool = False) -> None:
        """Ends every instance of the job; an instance whose agent is gone has ended with it."""
        if self.graph is None:
            return

        async def stop_one(member: Member) -> None:
            agent = self._node_of(member)
            if agent is None:
                return
            order = InstanceStop(job=self._job, sid=member.sid, incarnation=member.incarnation, now=now)
            await self._bus.command(STOP_INSTANCE, order, deadline_s=10.0, while_heard=True, agent=agent)

        running = [
            member
            for member in self.members.values()
            if self._mesh.state_of(member) is not InstanceState.GONE
        ]
        self.members.clear()
        await asyncio.gather(*(stop_one(member) for member in running), return_exceptions=True)

    def views(self) -> tuple[LiveInstanceView, ...]:
        """The job's instances for the live view."""
        if self.graph is None:
            return ()
        views = []
        for unit in self.units:
            place = self.graph.placement(unit.sid)
            member = self.members.get(unit.sid)
            state = self._mesh.state_of(member) if member else None
            views.append(
                LiveInstanceView(
                    sid=unit.sid,
                    role="data" if unit.kind is UnitKind.DATA else "stage",
                    stage=unit.stage,
                    cluster=place.cluster,
                    node=place.node,
                    state=str(state or "starting"),
                    device=place.device,
                    standby=unit.standby,
                )
            )
        return tuple(views)


def _is_silence(answer: object) -> bool:
    """Whether the member itself did not answer; an error that it reports about others is an answer."""
    if isinstance(answer, (NoResponders, DeadlineExceeded)):
        return not answer.answered
    return isinstance(answer, _LostInstance)
