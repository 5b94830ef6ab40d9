"""Fault handling (draft §4.4(5), §5.5): locate with SRD and MIC, judge, replace, bring back to one state.

An open step is given up whole and begun again as the next attempt: weights do not change between
commits, so nothing is lost but time, and nothing can be counted twice. A stage that lost every replica
goes back to the last checkpoint, and all others with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import (
    FAULT_VERDICT,
    JUDGE,
    RESOLVE,
    STATE_RESTORE,
    STATE_SEND,
    STATE_WAIT,
    STEP_ABORT,
    STOP_INSTANCE,
)
from entities.orchestrator.instances import Instances, MemberLost, StartFailed
from entities.orchestrator.journal import Journal
from entities.orchestrator.mesh_view import MeshView
from entities.orchestrator.placement import NoRoom, place
from entities.orchestrator.setbacks import Unrecoverable
from schemas.cluster import InstanceStop, Judge, Judgement
from schemas.errors import DmscError, NotFound, Unavailable
from schemas.fault import FaultReport, FaultVerdict
from schemas.registry import InstanceState, Resolve, Resolved, ServiceRecord
from schemas.step import Member, StateRestore, StateSend, StateWait, StepAbort, StepAborted
from schemas.task_graph import Placement, TaskUnit, UnitKind

log = get_logger("orchestrator")

OccupiedFn = Callable[[str], dict[str, list[Placement]]]
"""Slots promised to all jobs but the named one, by node agent."""

ASK_DEADLINE_S = 3.0
"""SRD and agents answer in milliseconds; one that is being restarted gets this long."""
ABORT_DEADLINE_S = 10.0
STATE_DEADLINE_S = 120.0
ROOM_DEADLINE_S = 600.0
"""How long a job with a lost instance waits for a free slot before it fails."""
RETRY_S = 0.5
"""Pause before a recovery that failed without a culprit is tried again."""
LAST_WORDS_S = 1.0
"""How long to wait until the registry says how a lost instance ended; mostly it has already."""
ROUNDS = 5
"""Recoveries that themselves lose members before the job fails."""


async def locate(
    bus: Bus, mesh: MeshView, instances: Instances, job: str, member: Member, report: FaultReport
) -> FaultVerdict:
    """Asks the registry and the node agent, and says what it was and how far it reaches."""
    try:
        found = await bus.command(RESOLVE, Resolve(sid=member.sid), deadline_s=ASK_DEADLINE_S)
        assert isinstance(found, Resolved)
        record = next((one for one in found.records if one.incarnation == member.incarnation), None)
        state = record.state if record is not None else InstanceState.GONE
    except Unavailable:
        state = mesh.state_of(member) or InstanceState.PENDING  # the registry is away: what it said last
    judgement: Judgement | None = None
    assert instances.graph is not None
    where = instances.graph.placement(member.sid)
    agent = mesh.agent_of(where.cluster, where.node)
    if agent is not None:
        try:
            query = Judge(job=job, sid=member.sid, incarnation=member.incarnation)
            answer = await bus.command(JUDGE, query, deadline_s=ASK_DEADLINE_S, agent=agent)
            assert isinstance(answer, Judgement)
            judgement = answer
        except (Unavailable, NotFound):
            agent = None
    verdict = judge(member, state, judgement, report)
    verdict = verdict.model_copy(update={"job": job})
    await bus.publish(FAULT_VERDICT, verdict, sid=member.sid)
    return verdict


def judge(
    member: Member, state: InstanceState, judgement: Judgement | None, report: FaultReport
) -> FaultVerdict:
    """Pure: registry state and the agent's judgement → verdict, scope, action."""
    base = {"job": report.job, "sid": member.sid, "incarnation": member.incarnation}
    if judgement is None:
        return FaultVerdict(
            **base,
            verdict="structural",
            scope="node",
            action="replace on another node",
            reason=f"its node agent does not answer; {report.evidence}",
        )
    if judgement.process in ("gone", "unknown"):
        return FaultVerdict(
            **base,
            verdict="structural",
            scope="instance",
            action="replace",
            reason=f"process {judgement.process}: {_evidence(judgement, report)}",
        )
    if state in (InstanceState.FAULTED, InstanceState.GONE):
        return FaultVerdict(
            **base,
            verdict="structural",
            scope="instance",
            action="fence and replace",
            reason=f"registry says {state}, process {judgement.process}: {report.evidence}",
        )
    if report.kind in ("link", "request"):
        return FaultVerdict(
            **base,
            verdict="transient",
            scope="none",
            action="repeat the step",
            reason=f"process {judgement.process}, registry {state}: {report.evidence}",
        )
    return FaultVerdict(
        **base,
        verdict="unfounded",
        scope="none",
        action="none",
        reason=f"process {judgement.process}, registry {state}",
    )


def _evidence(judgement: Judgement, report: FaultReport) -> str:
    """What the instance or its agent said of its end, before what is left of its process."""
    return (report.kind == "instance" and report.evidence) or judgement.evidence or report.evidence


class Recovery:
    """Brings a job's members back to one version of the weights, with new instances for the lost ones."""

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        instances: Instances,
        journal: Journal,
        epoch: int,
        occupied: OccupiedFn,
    ) -> None:
        self._bus = bus
        self._occupied = occupied
        self._fresh: set[Member] = set()  # started here, without the job's state as yet
        self._rolling = False  # a roll-back was begun and has not come to its end
        self._mesh = mesh
        self._instances = instances
        self._journal = journal
        self._job = journal.job
        self._epoch = epoch
        self._heard: set[Member] = set()

    async def last_words(self) -> list[ServiceRecord]:
        """How those ended that were lost since the last call, as far as the registry knows."""
        lost = sorted_members(self._instances.lost - self._heard)
        self._heard.update(lost)
        await self._mesh.until(lambda: all(self._mesh.has_ended(member) for member in lost), LAST_WORDS_S)
        return [record for member in lost if (record := self._mesh.last_of(member)) is not None]

    async def restore(self, step: int, attempt: int) -> int:
        """Aborts what is open below `attempt`, replaces the lost, evens out the state.

        Args:
            step: the next step to run; all that live have applied the ones before.
            attempt: the new attempt; older ones are forgotten everywhere.

        Returns:
            The step to go on with: `step`, or an earlier one after a rollback.

        Raises:
            DmscError: the job can't be brought back; the text says why.
        """
        last: DmscError | None = None
        for _ in range(ROUNDS):
            try:
                return await self._round(step, attempt)
            except MemberLost as lost:
                last = lost
                for member in lost.members:
                    self._instances.mark_lost(member)
            except StartFailed as error:
                last = error
                self._instances.mark_lost(error.member)
            except Unrecoverable:
                raise
            except DmscError as error:
                # an agent or the registry is being restarted, or somebody died whose death is not known yet
                last = error
                await asyncio.sleep(RETRY_S)
        raise Unrecoverable(f"recovery failed {ROUNDS} times, the last: {last}")

    async def _round(self, step: int, attempt: int) -> int:
        instances = self._instances
        lost = {member for member in instances.members.values() if member in instances.lost}
        alive = [member for member in instances.members.values() if member not in lost]
        order = StepAbort(
            job=self._job,
            epoch=self._epoch,
            step=step,
            attempt=attempt,
            fenced=tuple(sorted_members(instances.lost)),
        )
        answers = await instances.order(STEP_ABORT, order, alive, deadline_s=ABORT_DEADLINE_S)
        behind = []
        for member in instances.stage_members():
            answer = answers.get(member.sid)
            if member in lost or answer is None or member in self._fresh:
                continue
            assert isinstance(answer, StepAborted)
            if answer.version != step:
                behind.append(member)
        settled = [one for one in instances.stage_members() if one not in lost and one not in self._fresh]
        if behind and len(behind) < len(settled) and not self._rolling:
            raise MemberLost(behind, "not at the step that was committed")
        rollback = bool(behind) or self._rolling
        lost_units = (
            [instances.graph.unit(member.sid) for member in sorted_members(lost)] if instances.graph else []
        )
        survivors = {
            stage: [member for member in members if member not in lost and member not in self._fresh]
            for stage, members in enumerate(instances.stages())
        }
        rollback = rollback or any(not members for members in survivors.values())
        if lost_units:
            await self._clear(lost)
            await self._find_room(lost_units)
            started = await instances.start(lost_units)
            self._fresh.update(started)
            await instances.order(STEP_ABORT, order, started, deadline_s=ABORT_DEADLINE_S)
        newcomers = [member for member in instances.members.values() if member in self._fresh]
        if rollback:
            self._rolling = True
            step = await self._roll_back()
            self._rolling = False
        else:
            await self._transfer(survivors, newcomers, step)
        self._fresh.clear()
        return step

    async def _clear(self, lost: Iterable[Member]) -> None:
        """Makes sure that what was judged lost is dead, so that its slot is free and it can't wake up."""
        assert self._instances.graph is not None
        for member in lost:
            where = self._instances.graph.placement(member.sid)
            agent = self._mesh.agent_of(where.cluster, where.node)
            if agent is None:
                continue
            stop = InstanceStop(job=self._job, sid=member.sid, incarnation=member.incarnation, now=True)
            try:
                await self._bus.command(STOP_INSTANCE, stop, deadline_s=ASK_DEADLINE_S, agent=agent)
            except DmscError as error:
                log.warning("stop of a lost instance failed", sid=member.sid, reason=str(error))

    async def _find_room(self, units: list[TaskUnit]) -> None:
        """Keeps each unit's slot if its node is there and it is free, else places it anew; waits for room."""
        instances = self._instances
        assert instances.graph is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ROOM_DEADLINE_S
        while True:
            homeless = [unit for unit in units if not self._has_slot(unit)]
            if not homeless:
                return
            names = {unit.sid for unit in homeless}
            others = tuple(one for one in instances.graph.placements if one.sid not in names)
            placed = place(
                homeless,
                list(self._mesh.nodes.values()),
                clusters=self._journal.record.spec.parallel.clusters,
                occupied=self._taken(others),
            )
            if not isinstance(placed, NoRoom):
                instances.graph = instances.graph.model_copy(update={"placements": (*others, *placed)})
                return
            await self._journal.reason(f"{', '.join(sorted(names))}: {placed.reason}")
            left = deadline - loop.time()
            if left <= 0:
                raise Unrecoverable(f"no room for {', '.join(sorted(names))}: {placed.reason}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._mesh.next_change()

    def _has_slot(self, unit: TaskUnit) -> bool:
        """Its node is there, and its slot free and nobody else's."""
        graph = self._instances.graph
        assert graph is not None
        where = graph.placement(unit.sid)
        agent = self._mesh.agent_of(where.cluster, where.node)
        if agent is None:
            return False
        if unit.kind is UnitKind.DATA:
            return True
        rivals = [*graph.placements, *self._occupied(self._job).get(agent, [])]
        if any(
            one.sid != unit.sid
            and (one.cluster, one.node, one.slot) == (where.cluster, where.node, where.slot)
            for one in rivals
        ):
            return False
        return any(
            slot.index == where.slot and slot.busy_with in (None, unit.sid)
            for slot in self._mesh.nodes[agent].slots
        )

    def _taken(self, own: Iterable[Placement]) -> dict[str, list[Placement]]:
        """Slots promised to other jobs and to the rest of this one, by node agent."""
        taken = self._occupied(self._job)
        for one in own:
            agent = self._mesh.agent_of(one.cluster, one.node)
            if agent is not None and one.slot >= 0:
                taken.setdefault(agent, []).append(one)
        return taken

    async def _transfer(self, survivors: dict[int, list[Member]], newcomers: list[Member], step: int) -> None:
        """Streams the state of a survivor of the same stage to each newcomer."""
        assert self._instances.graph is not None

        async def one(newcomer: Member) -> None:
            assert self._instances.graph is not None
            unit = self._instances.graph.unit(newcomer.sid)
            if unit.kind is UnitKind.DATA:
                return
            source = survivors[unit.stage][0]
            send = StateSend(job=self._job, epoch=self._epoch, to=newcomer, version=step)
            await self._instances.order(STATE_SEND, send, [source], deadline_s=STATE_DEADLINE_S)
            wait = StateWait(job=self._job, epoch=self._epoch, version=step)
            await self._instances.order(STATE_WAIT, wait, [newcomer], deadline_s=STATE_DEADLINE_S)

        await asyncio.gather(*(one(newcomer) for newcomer in newcomers))

    async def _roll_back(self) -> int:
        """Everyone takes the last checkpoint (or the seed): a whole stage was lost."""
        record = self._journal.record
        version = record.checkpoint_step or 0
        await restore_all(
            self._job,
            self._epoch,
            self._instances,
            checkpoint_url(record.spec.artifacts, self._job, version),
            version,
        )
        await self._journal.tell("recovery", text=f"a whole stage was lost: all back to step {version}")
        return version


async def restore_all(job: str, epoch: int, instances: Instances, url: str, version: int) -> None:
    """Every stage instance takes the state of `version`; version 0 is built from the seed."""
    order = StateRestore(job=job, epoch=epoch, version=version, checkpoint=url if version else None)
    await instances.order(STATE_RESTORE, order, instances.stage_members(), deadline_s=STATE_DEADLINE_S)


def checkpoint_url(artifacts: str, job: str, version: int) -> str:
    return f"{artifacts.rstrip('/')}/{job}/checkpoints/{version:08d}"


def sorted_members(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: (member.sid, member.incarnation))
