"""What a policy had adopted lapses after the replicas that it knew have died: their standby goes on."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.recovery.standbys import Standbys
from entities.orchestrator.transaction.reduction_layout import ReductionLayouts
from schemas.envelope import EntityKind, Envelope
from schemas.job import JobState
from schemas.policy import ModuleLifecycle, ModuleState, PolicySuggestion, SetWeights
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.step import Member
from schemas.task_graph import TaskGraph, TaskUnit, UnitKind
from tests.builders.jobs import job
from tests.integration.entities.conftest import Dial
from tests.job_context import job_context
from tests.patience import PATIENCE_S

ONE, TWO, STANDBY = (Member(sid=f"j-s0-r{number}", incarnation="i") for number in range(3))
GRAPH = TaskGraph(
    units=tuple(
        TaskUnit(
            sid=one.sid,
            kind=UnitKind.STAGE,
            stage=0,
            replica=number,
            standby=one is STANDBY,
            first_layer=0,
            last_layer=1,
        )
        for number, one in enumerate((ONE, TWO, STANDBY))
    ),
    edges=(),
    constraints=(),
    placements=(),
    reason="",
    code_digest="",
    layer_count=1,
)
AT_REST = {ONE.sid: 1.0, TWO.sid: 1.0, STANDBY.sid: 0.0}


async def always() -> None:
    """This orchestrator leads."""


class Journal:
    def __init__(self) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.record = job("j", JobState.RUNNING)

    async def tell(self, kind: str, text: str) -> None:
        self.told.put_nowait(text)


async def test_a_lapse_leaves_the_standby_at_work_that_is_all_a_stage_has(dial: Dial) -> None:
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    communication = PolicyDistribution(bus, MeshView())
    stage = StagePolicy(stage=0, window=4, weights=AT_REST)
    communication.issue(
        CommunicationPolicy(
            job="j", revision=1, entry_gateway="g", clusters=("a",), reason="initial", stages=(stage,)
        )
    )
    instances: Any = SimpleNamespace(
        deployed=GRAPH,
        units=GRAPH.units,
        lost=set(),
        layouts=ReductionLayouts(),
        stages=lambda: ((ONE, TWO, STANDBY),),
    )
    progress: Any = SimpleNamespace(running=True, stages=((ONE, TWO, STANDBY),))
    telling: Any = SimpleNamespace(recovery=lambda text: None)
    journal = Journal()
    job = job_context(policies=communication, instances=instances, store=journal, events=telling)
    standbys = Standbys(job, progress)
    training, holding = SimpleNamespace(standbys=standbys), SimpleNamespace(replicas=2)
    actions = SimpleNamespace(
        freed=list,
        routes_objection=lambda action, by: "",
        routed=lambda action, by: None,
        unrouted=lambda knob, by: None,
    )
    run: Any = SimpleNamespace(job=job, step=0, training=training, holding=holding, actions=actions)
    mesh, queue = MeshView(), SimpleNamespace(waiting=())
    desk = PolicyService(bus, {"j": run}, mesh, queue, always, ArbitrationConfig())
    module = await dial("m", EntityKind.FUNCTIONAL_MODULE)
    lifecycle = ModuleLifecycle(module="m", version="1", state=ModuleState.ACTIVE, sid="m", incarnation="i")
    sent = Envelope(type="x", version=(1, 0), id="s-1", sender=module.sender, sent_at=time.time(), body={})
    await desk.lifecycle(lifecycle, sent)
    action = SetWeights(stage=0, weights={ONE.sid: 1.5, TWO.sid: 0.5})
    suggestion = PolicySuggestion(
        module="m",
        version="1",
        job="j",
        action=action,
        confidence=0.9,
        reason="r",
        input_revision=1,
        valid_s=1.0,
    )
    await desk.suggestion(suggestion, sent)
    assert communication.weights()[0][ONE.sid] == 1.5

    instances.lost |= {ONE, TWO}
    progress.stages = ((STANDBY,),)
    standbys.revise()
    assert communication.weights()[0][STANDBY.sid] > 0
    lapsing = asyncio.create_task(desk.lapses())
    async with asyncio.timeout(PATIENCE_S):
        while "valid" not in (text := await journal.told.get()) and "laps" not in text:
            pass
    lapsing.cancel()
    assert communication.weights()[0][STANDBY.sid] > 0, "nobody else lives"
    await communication.close()
