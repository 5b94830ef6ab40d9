"""The orchestrator believes the agent that it asked, and of a node that node's agent: nobody else's word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from entities.orchestrator import Orchestrator, OrchestratorConfig
from schemas.cluster import Analyse, AnalysisFailed, NodeStatus, Slot
from schemas.envelope import EntityKind as K
from schemas.envelope import Envelope, Sender
from schemas.errors import Ack, BadMessage
from schemas.gateway_api import JobQuery, MeshQuery, MeshStatus, SubmitJob
from schemas.job import JobRecord, JobState
from schemas.registry import Endpoint
from schemas.signals import NodeRegistration
from tests.builders.jobs import spec
from tests.integration.guard.conftest import Guarded
from tests.integration.guard.raw_connection import raw_connection
from tests.integration.guard.test_spoken_records import OTHER_AGENT, ask, bus_token
from tests.integration.guard.test_threats import AGENT, GATEWAY, ROUTER, SMO, bus_of
from tests.patience import PATIENCE_S
from tests.waiting import beside


@pytest_asyncio.fixture
async def dialled(mesh: Guarded) -> AsyncIterator[Callable[[Any], Awaitable[Bus]]]:
    """An orchestrator serves; dials as somebody."""
    async with AsyncExitStack() as stack:

        async def dial(who: Any) -> Bus:
            bus: Bus = await stack.enter_async_context(bus_of(mesh, who))
            return bus

        orchestrator = Orchestrator(await dial(SMO), OrchestratorConfig())
        async with beside(orchestrator.run()):
            await (await dial(GATEWAY)).command(subjects.MESH_QUERY, MeshQuery(), deadline_s=PATIENCE_S)
            yield dial


def status(bus: Bus, cluster: str) -> NodeStatus:
    return NodeStatus(
        sid=bus.sender.name,
        cluster=cluster,
        node="n",
        incarnation=bus.sender.incarnation,
        slots=(Slot(index=0, device="cpu"),),
        address="127.0.0.1",
        warm=True,
        sealing_key=bus.keyring.public,
    )


async def tell(bus: Bus, said: NodeStatus) -> None:
    await bus.command(subjects.NODE_STATUS, said, deadline_s=PATIENCE_S, sid=bus.sender.name)


async def test_only_who_was_asked_says_what_a_jobs_model_is(mesh: Guarded, dialled: Any) -> None:
    asked, other, gateway = await dialled(AGENT), await dialled(OTHER_AGENT), await dialled(GATEWAY)
    orders: asyncio.Queue[Analyse] = asyncio.Queue()

    async def analyse(order: Analyse, envelope: Envelope) -> Ack:
        orders.put_nowait(order)
        return Ack()

    async def fail(bus: Bus, job: str, text: str) -> None:
        failed = AnalysisFailed(job=job, code="bad_model", text=text)
        row = subjects.ANALYSIS_FAILED
        await bus.command(row, failed, deadline_s=PATIENCE_S, agent=bus.sender.name, job=job)

    async def record(job: str) -> JobRecord:
        found = await gateway.command(subjects.QUERY, JobQuery(job=job), deadline_s=PATIENCE_S)
        (one,) = found.jobs
        assert isinstance(one, JobRecord)
        return one

    await asked.serve(subjects.ANALYSE, analyse, agent=AGENT.name)
    await tell(asked, status(asked, "a"))
    await tell(other, status(other, "b"))
    submitted = SubmitJob(spec=spec(), user="bob", gateway=GATEWAY.name)
    job = (await gateway.command(subjects.SUBMIT, submitted, deadline_s=PATIENCE_S)).job
    async with asyncio.timeout(PATIENCE_S):
        await orders.get()

    await fail(other, job, "forged in its own name")
    forged = Sender(name=AGENT.name, kind=K.CLUSTER, incarnation="x")
    async with raw_connection(
        mesh.url, bus_token(mesh, OTHER_AGENT), OTHER_AGENT.name, K.CLUSTER
    ) as attacker:
        text = "forged in another's name"
        failed = AnalysisFailed(job=job, code="bad_model", text=text)
        told = subjects.ANALYSIS_FAILED(agent=OTHER_AGENT.name, job=job)
        await ask(attacker, told, failed, forged, "orchestrator._")
    await fail(other, job, "and once more")  # answered behind the forgery
    assert (await record(job)).state not in (JobState.FAILED, JobState.CANCELLED)

    ended: asyncio.Future[JobRecord] = asyncio.get_running_loop().create_future()

    async def changed(change: Change) -> None:
        if change.message is not None and change.message.state is JobState.FAILED and not ended.done():
            ended.set_result(change.message)

    watch = await gateway.bucket(subjects.JOB_RECORD).watch(changed)
    await fail(asked, job, "the factory returns no model")
    async with asyncio.timeout(PATIENCE_S):
        assert "the factory returns no model" in (await ended).reason
    await watch.stop()


async def test_a_node_is_of_the_cluster_that_its_agents_name_says(mesh: Guarded, dialled: Any) -> None:
    """Else it got the jobs of a cluster that its credential is not for, and their secrets."""
    other, gateway = await dialled(OTHER_AGENT), await dialled(GATEWAY)
    with pytest.raises(BadMessage, match="the agent of its cluster and node in it is a-n"):
        await tell(other, status(other, "a"))
    await tell(other, status(other, "b"))
    seen = await gateway.command(subjects.MESH_QUERY, MeshQuery(), deadline_s=PATIENCE_S)
    assert isinstance(seen, MeshStatus)
    assert [(node.sid, node.cluster) for node in seen.nodes] == [(OTHER_AGENT.name, "b")]


async def test_a_router_is_no_gateway_and_of_its_own_cluster(mesh: Guarded, dialled: Any) -> None:
    router = await dialled(ROUTER)
    for kind, cluster in ((K.GATEWAY, "a"), (K.ROUTER, "b"), (K.ROUTER, "a")):
        said = NodeRegistration(
            sid=ROUTER.name,
            kind=kind,
            incarnation="i",
            endpoint=Endpoint(cluster=cluster, node="n"),
            services=(),
        )
        telling = router.command(subjects.MESH_REGISTRATION, said, deadline_s=PATIENCE_S, sid=ROUTER.name)
        if (kind, cluster) == (K.ROUTER, "a"):
            await telling
        else:
            with pytest.raises(BadMessage, match="the one of its kind and cluster"):
                await telling
