"""A server that stands still, with real processes: nobody is taken for dead, and the weights are the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from bus.messaging.port import MessagingTimes
from bus.nats.dialer import ConnectionTimes
from bus.server.embedded import EmbeddedServer
from bus.server.embedded_cluster import EmbeddedCluster, copies
from entities.service_registry.core import RegistrationLeaseConfig
from schemas.gateway_api import MeshStatus
from schemas.job import JobRecord, JobSpec, JobState
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.expected_weights import check_weights_at, undisturbed_at
from tests.integration.mesh.own_mesh import CLUSTERS, OwnMesh, Witness
from tests.integration.mesh.tripwire import Tripwire
from tests.waiting import eventually

MOMENTS = {
    "deploying": ("STREAM.MSG.GET.KV_link_secrets", 2 * MessagingTimes.bucket_call_s),
    "adopting": ("DIRECT.GET.KV_registry.$KV.registry.{job}-", 2 * MessagingTimes.bucket_call_s),
    "finishing": ("STREAM.MSG.GET.OBJ_artifacts", ConnectionTimes.call_s + MessagingTimes.bucket_call_s),
}
"""What the orchestrator asks the bus outside a job's steps, and for how long it gets no answer: longer than
it waits for one."""
STANDS_STILL_S = RegistrationLeaseConfig().expiry_s + 4 * RegistrationLeaseConfig().tick_s + 2.0
"""Longer than any lease, and than what a registry needs to notice that one has run out."""


@pytest.fixture(scope="module")
def wire(server: EmbeddedServer) -> Iterator[Tripwire]:
    """On the orchestrator's way to the bus."""
    with Tripwire(server.url, lambda: server.pid) as wire:
        yield wire


@pytest.fixture(scope="module")
def own(
    tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer, wire: Tripwire
) -> Iterator[OwnMesh]:
    mesh = OwnMesh(tmp_path_factory.mktemp("own"), [server], addresses={"smo-1": [wire.url]})
    with mesh.running():
        yield mesh


async def test_a_server_that_stands_still_costs_no_instance(own: OwnMesh, witness: Witness) -> None:
    before = await witness.ready()
    name = await at_work(witness, "still")
    await stands_still(own.servers[0])
    assert (await witness.record(name)).state is JobState.RUNNING, "it was over before the freeze"
    await check(witness, name)
    assert entities(await witness.ready()) == entities(before)


async def test_the_server_of_the_instances_alone_stands_still_and_costs_none(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The judges are on the other two of three, which go on: they hear everything but the instances."""
    folder = tmp_path_factory.mktemp("three")
    async with EmbeddedCluster(folder / "nats", size=3, sync_always=False) as cluster:
        theirs, *others = cluster.servers
        agents = {f"agent-{each}": [theirs.url] for each in CLUSTERS}
        mesh = OwnMesh(folder, others, replicas=copies(3), addresses=agents)
        with mesh.running():
            async with mesh.client() as client:
                before = await client.ready()
                name = await at_work(client, "still-three")
                instances = {pid for pids in client.processes[name].values() for pid in pids}
                assert len(instances) > 4
                assert {on(cluster, pid) for pid in instances} == {(theirs,)}
                await stands_still(theirs)
                assert {on(cluster, pid) for pid in instances} == {(theirs,)}, "they have left it meanwhile"
                assert (await client.record(name)).state is JobState.RUNNING, "it was over before the freeze"
                await check(client, name)
                assert entities(await client.ready()) == entities(before)


def job_of(name: str, steps: int) -> JobSpec:
    training = {"steps": steps, "validation_microbatches": 0}
    return tiny_job(name, training=training, parallel={"stages": 2, "replicas": 2})


async def at_work(client: Witness, name: str) -> str:
    """A job in mid-run, which is still running when the server goes on."""
    spec = padded(job_of(name, 20), pad_ms=20.0)
    await undisturbed_at(client, spec)  # computed beforehand
    job = await client.submit(spec)
    await client.until_step(job, 3)
    return job


async def stands_still(server: EmbeddedServer) -> None:
    """For longer than any lease."""
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        await asyncio.sleep(STANDS_STILL_S)  # it is this long that nobody hears anything
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    finally:
        os.kill(pid, signal.SIGCONT)


async def check(client: Witness, name: str) -> JobRecord:
    """Done, with the undisturbed job's weights, by the processes that began it."""
    record = await check_weights_at(client, name)
    assert record.recoveries == 0, [event.text async for event in client.events(name) if event.text]
    assert {len(pids) for pids in client.processes[name].values()} == {1}, "somebody was replaced"
    return record


def entities(status: MeshStatus) -> dict[str, str]:
    """Incarnations by SID."""
    return {one.sid: one.incarnation for one in status.services if one.job is None}


def on(cluster: EmbeddedCluster, pid: int) -> tuple[EmbeddedServer, ...]:
    """The servers that a process is connected to."""
    connections = psutil.Process(pid).net_connections("tcp")
    ports = {one.raddr.port for one in connections if one.raddr and one.status == psutil.CONN_ESTABLISHED}
    return tuple(server for server in cluster.servers if int(server.url.rpartition(":")[2]) in ports)


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("deploying", marks=pytest.mark.matrix),
        "adopting",
        pytest.param("finishing", marks=pytest.mark.matrix),
    ],
)
async def test_a_server_that_stands_still_outside_the_steps_ends_no_job(
    own: OwnMesh, witness: Witness, wire: Tripwire, moment: str
) -> None:
    words, stands_still_s = MOMENTS[moment]
    spec = job_of(moment, 8)
    await undisturbed_at(witness, spec)  # computed beforehand
    if moment != "adopting":
        wire.arm(words)
    name = await witness.submit(spec)
    if moment == "adopting":
        await witness.until_step(name, 3)
        wire.arm(words.format(job=name))
        own.kill("smo-1")
        own.start("smo-1")
    await wire.tripped()
    try:
        await asyncio.sleep(stands_still_s)  # it is this long that nobody hears anything
    finally:
        wire.release()
    record = await check(witness, name)
    assert record.epoch == (2 if moment == "adopting" else 1)


async def test_instances_that_are_lost_with_their_fork_server_before_they_are_ready_are_planned_again(
    own: OwnMesh, witness: Witness
) -> None:
    gate = own.folder / "gate"
    gate.touch()
    model = {"factory": "troubled:orphaning", "args": {"gate": str(gate)}}
    name = await witness.submit(tiny_job("orphaned", model=model))
    record = await witness.ended(name)
    assert not gate.exists(), "no fork server was ended"
    assert record.state is JobState.DONE, record.reason
    told = [event.text async for event in witness.events(name) if event.kind == "fault"]
    assert any("lost with the fork server; planned again" in text for text in told), told
