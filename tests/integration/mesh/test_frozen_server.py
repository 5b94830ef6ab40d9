"""A server that stands still, with real processes: nobody is taken for dead, and the weights are the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from bus.embedded import EmbeddedServer
from entities.registry_core import LeaseConfig
from schemas.job import JobState
from tests.integration.bus.records import until
from tests.integration.mesh.conftest import tiny_job
from tests.integration.mesh.own_mesh import OwnMesh
from tests.integration.mesh.undisturbed import undisturbed_at

STANDS_STILL_S = LeaseConfig().expiry_s + 4 * LeaseConfig().tick_s + 2.0
"""Longer than any lease, and than what a registry needs to notice that one has run out."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnMesh]:
    folder = tmp_path_factory.mktemp("own")
    server = EmbeddedServer(folder / "nats", sync_always=False)
    asyncio.run(server.start())
    mesh = OwnMesh(folder, [server], slots=3)
    try:
        mesh.start_all("smo-1")
        yield mesh
    finally:
        mesh.stop_all()
        asyncio.run(server.stop())


async def test_a_server_that_stands_still_costs_no_instance(own: OwnMesh) -> None:
    async with own.client() as client:
        before = await client.ready()
        job = tiny_job(
            "still",
            training={"steps": 400, "validation_microbatches": 0},
            parallel={"stages": 2, "replicas": 2},
        )
        expected = await undisturbed_at(client, job)
        name = await client.submit(job)
        await client.until_step(name, 3)
        server = own.servers[0].pid
        os.kill(server, signal.SIGSTOP)
        try:
            await until(lambda: psutil.Process(server).status() == psutil.STATUS_STOPPED)
            await asyncio.sleep(STANDS_STILL_S)  # it is this long that nobody hears anything
        finally:
            os.kill(server, signal.SIGCONT)
        assert (await client.record(name)).state is JobState.RUNNING, "it was over before the freeze"
        record = await client.ended(name)
        assert record.state is JobState.DONE, record.reason
        assert record.recoveries == 0, [event.text async for event in client.events(name) if event.text]
        assert record.weights is not None
        assert record.weights.sha256 == expected
        assert {len(pids) for pids in client.processes[name].values()} == {1}, "somebody was replaced"
        after = await client.ready()
        assert {one.sid: one.incarnation for one in after.services if one.job is None} == {
            one.sid: one.incarnation for one in before.services if one.job is None
        }
