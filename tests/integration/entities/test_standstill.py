"""The bus stands still while a job is analysed, or waits for instances: that is nobody's death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from bus.nats.dialer import ConnectionTimes
from bus.server.embedded import EmbeddedServer
from entities.orchestrator.job.bus_outages import BusOutages, OutageTimes
from entities.orchestrator.job.model_analysis import ModelAnalysis
from entities.orchestrator.job.shared_analyses import SharedAnalyses
from entities.orchestrator.job_state.context import JobTimes, RecoveryTimes, RunTimes
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.recovery.joining import JoiningMembers
from schemas.cluster import Analyse, AnalysisFailed, NodeStatus, Slot
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadModel, Unavailable
from schemas.job import JobState
from schemas.task_graph import ModelTopology, TaskUnit, UnitKind
from tests.builders.jobs import job
from tests.integration.entities.conftest import Dial
from tests.job_context import job_context
from tests.patience import PATIENCE_S

LIMIT_S = ConnectionTimes.gap_s + 0.5
"""In place of the product's limits, which are longer; more than passes until a bus is known to be silent."""
STANDS_STILL_S = 2.5 * LIMIT_S


@contextlib.asynccontextmanager
async def standstill(server: EmbeddedServer) -> AsyncIterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


class Journal:
    """A job's record, as far as an analysis writes it."""

    def __init__(self) -> None:
        self.record = job("j", JobState.ANALYSING)
        self.said: list[str] = []

    async def reason(self, text: str) -> None:
        self.said.append(text)


class Analyst:
    """A node agent. `answers`: what becomes of its analyses, one after the other."""

    def __init__(self, *answers: ModelTopology | AnalysisFailed) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def serve(self, bus: Bus, mesh: MeshView, work: ModelAnalysis, sid: str) -> None:
        async def analyse(order: Analyse, envelope: Envelope) -> Ack:
            self.asked.append(envelope.id)
            answer = self._answers.pop(0)
            if isinstance(answer, ModelTopology):
                work.topology(answer, sid)
            else:
                work.analysis_failed(answer, sid)
            return Ack()

        await bus.serve(subjects.ANALYSE, analyse, agent=sid)
        slots = (Slot(index=0, device="cpu"),)
        node = {"sid": sid, "cluster": "a", "node": "n", "incarnation": "i", "address": "127.0.0.1"}
        await mesh.node(NodeStatus(**node, slots=slots, warm=True))


TOPOLOGY = ModelTopology(
    job="j",
    cluster="a",
    node="n",
    layers=(),
    parameters=1,
    input_bytes=1,
    data_tokens=1,
    code_digest="",
    device="cpu",
)


async def test_a_bus_that_stands_still_before_an_analysis_is_acknowledged_costs_no_analyst(
    own_server: EmbeddedServer, dial: Dial
) -> None:
    times = JobTimes(run=RunTimes(analysis_accept_s=LIMIT_S))
    bus, mesh = await dial("orchestrator", EntityKind.ORCHESTRATOR), MeshView()
    journal: Any = Journal()
    work = ModelAnalysis(job_context(bus=bus, mesh=mesh, store=journal, times=times), SharedAnalyses())
    analyst = Analyst(TOPOLOGY)
    await analyst.serve(await dial("agent-a"), mesh, work, "agent-a")
    async with standstill(own_server):
        analysing = asyncio.create_task(work.analyse())
        await asyncio.sleep(STANDS_STILL_S)
        assert not analysing.done()
    assert await asyncio.wait_for(analysing, PATIENCE_S) == TOPOLOGY
    assert len(analyst.asked) == 1


async def test_an_analysis_that_lacked_the_bus_is_made_again_and_a_verdict_is_not(dial: Dial) -> None:
    bus, mesh = await dial("orchestrator", EntityKind.ORCHESTRATOR), MeshView()
    journal: Any = Journal()
    outages = BusOutages("j", journal.reason)
    lacked = AnalysisFailed(job="j", code="bus_unreachable", text="no bus at nats://x")
    work, analyst = (
        ModelAnalysis(job_context(bus=bus, mesh=mesh, store=journal), SharedAnalyses()),
        Analyst(lacked, lacked, lacked, lacked, TOPOLOGY),
    )
    await analyst.serve(await dial("agent-a"), mesh, work, "agent-a")
    assert await outages.outlast("analysing", work.analyse) == TOPOLOGY
    assert len(analyst.asked) == 5
    stuck = AnalysisFailed(job="j", code="no_progress", text="made no progress for 120 s and was ended")
    work, analyst = (
        ModelAnalysis(job_context(bus=bus, mesh=mesh, store=journal), SharedAnalyses()),
        Analyst(stuck),
    )
    await analyst.serve(await dial("agent-b"), MeshView(), work, "agent-b")
    await mesh.node(mesh.nodes.pop("agent-a").model_copy(update={"sid": "agent-b"}))
    with pytest.raises(BadModel, match="no progress"):
        await outages.outlast("analysing", work.analyse)


async def test_what_a_job_waits_for_is_said_once_it_takes_long() -> None:
    journal, tries = Journal(), 0

    async def work() -> str:
        nonlocal tries
        tries += 1
        if len(journal.said) < 1:
            raise Unavailable("the bus's store is full")
        return "done"

    outages = BusOutages("j", journal.reason, OutageTimes(quiet_s=0.5))
    assert await outages.outlast("writing its weights", work) == "done"
    assert journal.said == ["waits for the bus, writing its weights: the bus's store is full"]
    assert tries > 2


UNIT = TaskUnit(sid="j-s0-r0", kind=UnitKind.STAGE, stage=0, replica=0, first_layer=0, last_layer=1)


class Homeless:
    """A job of one unit, lost, for which there is no room; as far as `JoiningMembers` looks at it."""

    units = (UNIT,)
    members: dict[str, Any] = {}
    lost: set[Any] = set()
    homeless = {UNIT.sid: "no free slot"}

    def present(self) -> list[Any]:
        return []

    async def bring(self, sid: str, lost: None, *, dispensable: bool) -> None:
        await asyncio.Event().wait()


async def test_a_bus_that_stands_still_parks_no_job_for_want_of_room(
    own_server: EmbeddedServer, dial: Dial
) -> None:
    times = JobTimes(recovery=RecoveryTimes(parked_after_s=LIMIT_S))
    bus = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    homeless: Any = Homeless()
    tasks = GuardedTasks()
    coming = JoiningMembers(
        job_context(bus=bus, instances=homeless, tasks=tasks, times=times), homeless, homeless
    )
    try:
        async with standstill(own_server):
            coming.bring(UNIT.sid)
            waiting = asyncio.create_task(coming.until_there())
            await asyncio.sleep(STANDS_STILL_S)
            assert not waiting.done()
        with pytest.raises(Parked, match="no free slot"):
            await asyncio.wait_for(waiting, PATIENCE_S)
    finally:
        await tasks.close()
