"""What a killed leader left of jobs that have ended does not hold its slots for ever."""

from __future__ import annotations

import asyncio

from bus import subjects
from bus.messaging.key_value import Change
from entities.orchestrator.job.teardown import LeftInstances
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import ForgetTopology
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack
from schemas.registry import Endpoint
from tests.builders.graphs import node
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial
from tests.waiting import eventually


async def test_instances_of_ended_jobs_end_and_those_of_others_stay(dial: Dial) -> None:
    forgotten: list[str] = []
    mesh = MeshView()

    async def forget(message: ForgetTopology, envelope: Envelope) -> Ack:
        forgotten.append(message.job)
        await mesh.record(Change(f"{message.job}-s0-r0", 9))
        return Ack()

    agent = await dial("a-n", EntityKind.CLUSTER)
    await agent.serve(subjects.FORGET_TOPOLOGY, forget, agent="a-n")
    place = Endpoint(cluster="a", node="n")
    for job in ("done", "again", "open", "unknown"):
        await mesh.record(Change(f"{job}-s0-r0", 1, instance(f"{job}-s0-r0", endpoint=place)))
    orchestrator = await dial("orchestrator", EntityKind.ORCHESTRATOR)
    ended, running = dict.fromkeys(("done", "again")), dict.fromkeys(("open", "again"))
    left = LeftInstances(orchestrator, mesh, ended, running, look_every_s=0.01)
    looking = asyncio.create_task(left.run())
    await mesh.node(node("a"))  # its agent is back
    await eventually(lambda: "done-s0-r0" not in mesh.records)
    assert set(forgotten) == {"done"}
    assert len(mesh.records) == 3
    looking.cancel()
    await asyncio.wait({looking})
