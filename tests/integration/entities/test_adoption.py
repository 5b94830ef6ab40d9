"""A new orchestrator takes over while a dead newcomer is being sent its state; instances are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bus import subjects
from bus.connection import Bus
from entities.orchestrator.job.takeover_service import TakeoverService
from entities.orchestrator.job_state.decision_record import DecisionRecord
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.envelope import EntityKind, Envelope
from schemas.registry import InstanceState
from schemas.step import (
    Adopt,
    Adopted,
    Member,
    StepAbort,
    StepAborted,
    StepApplied,
    StepCommit,
    StepDecision,
    StepFence,
    StepFenced,
)
from schemas.task_graph import TaskGraph, TaskUnit, UnitKind
from tests.builders.jobs import job
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial
from tests.job_context import job_context

SENDER, NEWCOMER, BESIDE = (
    Member(sid=f"j-s0-r{number}", incarnation=name) for number, name in enumerate("abc")
)
UNITS = tuple(
    TaskUnit(sid=f"j-s0-r{one}", kind=UnitKind.STAGE, stage=0, replica=one, first_layer=0, last_layer=1)
    for one in range(3)
)
GRAPH = TaskGraph(
    units=UNITS, edges=(), constraints=(), placements=(), reason="", code_digest="", layer_count=1
)
DECISION = StepDecision(
    job="j",
    epoch=1,
    step=3,
    attempt=0,
    generations=(0,),
    membership=((SENDER, BESIDE),),
    checksums=("",),
    gradient_norm=0.0,
    clip=1.0,
    action="apply",
)


@dataclass
class StandIn:
    """An instance that has prepared step 3 (version 3), or applied it (version 4)."""

    member: Member
    version: int
    told: list[Any] = field(default_factory=list)

    async def serve(self, bus: Bus) -> None:
        for row in (subjects.ADOPT, subjects.STEP_FENCE, subjects.STEP_COMMIT, subjects.STEP_ABORT):
            await bus.serve(row, self._obey, job="j", sid=self.member.sid)

    async def _obey(self, order: Any, envelope: Envelope) -> Any:
        self.told.append(order)
        match order:
            case Adopt():
                prepared = 3 if self.version == 3 else -1
                return Adopted(
                    member=self.member, version=self.version, attempt=0, generation=0, prepared=prepared
                )
            case StepFence():
                return StepFenced(member=self.member, version=self.version, round=order.round, held=())
            case StepCommit():
                self.version = order.step + 1
                return StepApplied(member=self.member, version=self.version)
        assert isinstance(order, StepAbort)
        return StepAborted(member=self.member, version=self.version)


async def test_a_dead_newcomer_is_fenced_before_anybody_waits_for_its_state(dial: Dial) -> None:
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    sender, beside = StandIn(SENDER, 3), StandIn(BESIDE, 4)
    for one in (sender, beside):
        await one.serve(await dial(one.member.sid, EntityKind.INSTANCE))
    states = {SENDER: InstanceState.ACTIVE, NEWCOMER: InstanceState.FAULTED, BESIDE: InstanceState.ACTIVE}
    for member, state in states.items():
        record = instance(member.sid, incarnation=member.incarnation, state=state)
        await bus.bucket(subjects.REGISTRY_RECORD).put(record, sid=member.sid)
    before = DecisionRecord(bus, "j", 1)
    await before.take()
    await before.write(DECISION)
    record = job("j").model_copy(update={"epoch": 2})
    instances = JobInstances(bus, MeshView(), record)
    instances.graph = GRAPH
    decisions = DecisionRecord(bus, "j", 2)
    resume_point = await TakeoverService(
        job_context(record, bus=bus, mesh=MeshView(), instances=instances, decisions=decisions)
    ).find_resume_point()
    assert resume_point is not None
    assert resume_point.stages == ((SENDER, BESIDE),)
    adopt, fence, commit, abort = sender.told
    assert isinstance(adopt, Adopt)
    assert isinstance(fence, StepFence)
    assert (fence.fenced, fence.step, fence.attempt) == ((NEWCOMER,), 3, 0)
    assert isinstance(commit, StepCommit)
    assert isinstance(abort, StepAbort)
    assert abort.fenced == (NEWCOMER,)
    assert [type(order) for order in beside.told] == [Adopt, StepAbort]
    assert beside.told[1].fenced == (NEWCOMER,)
