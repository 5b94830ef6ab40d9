"""The control plane is killed piece by piece while a job runs: no instance dies, the weights are the same.

Each thing is killed at a chosen moment of a step and started again, as a supervisor would.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
import pytest_asyncio

from bus import subjects
from bus.messaging.handlers import Subscription
from bus.messaging.key_value import Change, Watch
from bus.nats import jetstream
from bus.server.embedded import EmbeddedServer
from bus.server.embedded_cluster import EmbeddedCluster, copies
from bus.subject_row import Subject
from entities.presence.service_area import server_of
from schemas.base import Message
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind, Envelope
from schemas.job import JobRecord, JobSpec, JobState
from schemas.registry import InstanceState
from schemas.step import StepDecision
from tests.integration.mesh.conftest import padded, tiny_job
from tests.integration.mesh.expected_weights import check_weights_at
from tests.integration.mesh.own_mesh import CLUSTERS, OwnMesh, Witness
from tests.patience import PATIENCE_S
from tests.waiting import eventually

ORCHESTRATORS = ("smo-1", "smo-2")
STEPS = 7
UNITS = 6
"""Two stages of two replicas, and a data instance in each cluster."""
STRUCK_AT = 2
"""The step in which the fault is injected, where there is but one."""
OUTAGE_S = 5.0


def spec(name: str, stages: int = 2, replicas: int = 2, pad_ms: float = 0.0) -> JobSpec:
    """`pad_ms`: each pass of a block waits for so long, so that a step outlasts the start of a process."""
    job = tiny_job(
        name,
        training={"steps": STEPS, "seed": 11, "checkpoint_every": 3},
        parallel={"stages": stages, "replicas": replicas},
    )
    return padded(job, pad_ms)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> Iterator[OwnMesh]:
    """One server, two orchestrators, every entity in a process of its own."""
    with OwnMesh(tmp_path_factory.mktemp("own"), [server]).running(*ORCHESTRATORS) as mesh:
        mesh.start("policy", ["policy", "run", "service-time-weights"])
        yield mesh


@contextlib.asynccontextmanager
async def seen(
    client: Witness, job: str, row: Subject, step: int, epoch: int = 0, **tokens: str
) -> AsyncIterator[asyncio.Future[Message]]:
    """The first message of a row that belongs to this step of the job or a later one, likewise its epoch."""
    found: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def notice(message: Message | None) -> None:
        late = getattr(message, "step", -1) >= step and (not epoch or getattr(message, "epoch", 0) >= epoch)
        if message is not None and late and not found.done():
            found.set_result(message)

    async def look(message: Message, envelope: Envelope) -> None:
        notice(message)

    subscription: Subscription | Watch
    if row.bucket is None:
        subscription = await client.bus.subscribe(row, look, job=job, **tokens)
    else:

        async def changed(change: Change) -> None:
            notice(change.message)

        subscription = await client.bus.bucket(row).watch(changed, job=job)
    try:
        yield found
    finally:
        await subscription.stop(drain=False)


async def struck(client: Witness, job: str, row: Subject, step: int = STRUCK_AT, epoch: int = 0) -> None:
    """Waits for the moment."""
    async with seen(client, job, row, step, epoch) as found, asyncio.timeout(PATIENCE_S):
        await found
    assert (await client.record(job)).state is not JobState.DONE, "the fault came too late"


async def name_of_leader(client: Witness) -> str:
    lease = await client.leader()
    return next(name for name, pid in client.mesh.alive().items() if pid == lease.pid)


async def check(client: Witness, job: str) -> JobRecord:
    """The job ended well, with the weights of the undisturbed one, and every step exactly once."""
    record = await check_weights_at(client, job)
    decision = await client.bus.bucket(subjects.STEP_DECISION).get(leader=True, job=job)
    if decision is not None:  # the last word is the last epoch's
        assert isinstance(decision.message, StepDecision)
        assert decision.message.epoch == record.epoch
    return record


async def records_named(client: Witness, name: str) -> list[JobRecord]:
    """All records of jobs of this name, whoever wrote them: a leader lists only those that it knows."""
    entries = await client.bus.bucket(subjects.JOB_RECORD).entries()
    return [entry.message for entry in entries if entry.message.spec.name == name]


def same_pids(client: Witness, job: str) -> None:
    """No instance died: from its first to its last step, each unit was run by one and the same process."""
    ran = client.processes[job]
    assert len(ran) == UNITS
    assert all(len(pids) == 1 for pids in ran.values()), ran


# --- the orchestrator ------------------------------------------------------------------------------------

PHASES = {
    "microbatches are dispatched": subjects.STEP_BEGIN,
    "microbatches are claimed": subjects.STEP_CLAIM,
    "members prepare": subjects.STEP_PREPARE,
    "the decision is recorded": subjects.STEP_DECISION,
    "members commit": subjects.STEP_COMMIT,
}


@pytest_asyncio.fixture
async def substitutes(own: OwnMesh) -> AsyncIterator[list[str]]:
    """More orchestrators, which stand by: one for each that is killed."""
    names = [f"smo-{number}" for number in range(3, 2 + len(PHASES))]
    for name in names:
        own.start(name, ["run", "orchestrator"])
    yield names
    for name in names:
        own.retire(name)


async def test_the_leading_orchestrator_is_killed_in_each_phase_and_another_takes_over(
    witness: Witness, substitutes: list[str]
) -> None:
    await witness.ready()
    job = await witness.submit(spec("leaders-killed"))
    for step, (phase, row) in enumerate(PHASES.items(), start=1):
        # In the epoch of who leads now: what its predecessor said may be heard late, and one that dies before
        # it has taken the job up leaves no epoch behind.
        await struck(witness, job, row, step, epoch=step)
        before = await witness.leader()
        witness.mesh.kill(await name_of_leader(witness))
        after = await witness.until_next_term(before)
        standing = [pid for name, pid in witness.mesh.alive().items() if name.startswith("smo-")]
        assert len(standing) == len(ORCHESTRATORS) + len(substitutes) - step
        assert after.term == before.term + 1, phase
        assert after.pid in standing, phase
    record = await check(witness, job)
    assert record.epoch >= 1 + len(PHASES)  # who stands still for a second loses the lease as well
    same_pids(witness, job)


async def test_the_only_orchestrator_is_killed_and_starts_again(witness: Witness) -> None:
    name = await name_of_leader(witness)
    other = next(one for one in ORCHESTRATORS if one != name)
    witness.mesh.kill(other)
    job = await witness.submit(spec("leader-restarted"))
    await struck(witness, job, subjects.STEP_PREPARE)
    before = await witness.leader()
    witness.mesh.kill(name)
    witness.mesh.start(name)
    await witness.until_next_term(before)
    record = await check(witness, job)
    assert record.epoch == 2


async def test_a_frozen_leader_that_wakes_up_decides_nothing(witness: Witness) -> None:
    """Its lease is gone and its records are another epoch's: it stands by, and answers nobody."""
    before = await witness.leader()
    name = await name_of_leader(witness)
    job = await witness.submit(spec("leader-frozen"))
    await struck(witness, job, subjects.STEP_PREPARE)
    witness.mesh.kill(name, signal.SIGSTOP)
    try:
        after = await witness.until_next_term(before)
    finally:
        witness.mesh.kill(name, signal.SIGCONT)
    # What it was asked while it was frozen lies in its socket: were it to act on it, there would be two jobs.
    second = await witness.submit(spec("second", 1, 1))
    record = await check(witness, job)
    assert record.epoch >= 2  # who stands still for a second loses the lease as well
    await check(witness, second)
    status = await witness.ready()
    standing = [one for one in status.services if one.kind is EntityKind.ORCHESTRATOR]
    assert {one.endpoint.pid for one in standing} == {before.pid, after.pid}
    assert (await witness.leader()).pid == after.pid
    assert len(await records_named(witness, "second")) == 1
    assert name in witness.mesh.alive()


async def test_a_submission_that_two_leaders_hear_is_one_job(witness: Witness) -> None:
    """The leader dies with a submission in its hands; the gateway repeats it to the next one."""
    before = await witness.leader()
    name = await name_of_leader(witness)
    witness.mesh.kill(name, signal.SIGSTOP)
    try:
        submitting = asyncio.create_task(witness.submit(spec("once", 1, 1)))
        await witness.until_next_term(before)
        job = await asyncio.wait_for(submitting, PATIENCE_S)
    finally:
        witness.mesh.kill(name, signal.SIGCONT)
    await check(witness, job)
    await witness.ready()  # the one that was frozen has found out
    assert len(await records_named(witness, "once")) == 1


async def test_a_job_that_was_cancelled_ends_also_if_the_leader_dies_over_it(witness: Witness) -> None:
    """What was answered holds: the next leader cleans up, and brings nothing back."""
    job = await witness.submit(spec("cancelled"))
    await struck(witness, job, subjects.STEP_PREPARE)
    before = await witness.leader()
    witness.mesh.kill("router-a", signal.SIGSTOP)  # the clean-up waits for its report, so that it is struck
    try:
        await asyncio.gather(*(witness.ask("job.cancel", job=job) for _ in range(2)))  # an answer may be lost
        witness.mesh.kill(await name_of_leader(witness))
        assert (await witness.record(job)).state is JobState.RUNNING, "the fault came too late"
    finally:
        witness.mesh.kill("router-a", signal.SIGCONT)
    await witness.until_next_term(before)
    async with asyncio.timeout(PATIENCE_S):
        record = await witness.ended(job)
    assert (record.state, record.reason) == (JobState.CANCELLED, "asked for at the NATS door")
    assert record.recoveries == 0
    pids = [pid for ran in witness.processes[job].values() for pid in ran]
    assert len(pids) == UNITS
    await eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    left = await witness.bus.bucket(subjects.REGISTRY_RECORD).entries()
    over = (InstanceState.FAULTED, InstanceState.GONE)
    assert [one.key for one in left if one.message.job == job and one.message.state not in over] == []
    await check(witness, await witness.submit(spec("next", 1, 1)))  # its slots are free


# --- everybody else --------------------------------------------------------------------------------------


async def test_entities_are_killed_in_turn_and_nobody_else_notices(witness: Witness) -> None:
    job = await witness.submit(spec("entities-killed", pad_ms=40.0))
    expected = witness.mesh.alive()
    for step, victim in enumerate(["registry", "router-a", "authorizer", "router-b", "policy"], start=1):
        await struck(witness, job, subjects.STEP_BEGIN, step)
        killed = witness.mesh.kill(victim)
        expected[victim] = witness.mesh.start(victim)
        assert expected[victim] != killed
    await check(witness, job)
    same_pids(witness, job)
    assert witness.mesh.alive() == expected


async def test_the_entry_gateway_is_killed(witness: Witness) -> None:
    """It comes back and dispatches on, or another one is made the entry; then one that does not come back."""
    job = await witness.submit(spec("entry-killed", pad_ms=10.0))
    others = witness.mesh.alive()
    for step, back in ((1, True), (4, False)):
        async with (
            seen(witness, job, subjects.STEP_BEGIN, step, gateway="gateway-a") as by_a,
            seen(witness, job, subjects.STEP_BEGIN, step, gateway="gateway-b") as by_b,
            asyncio.timeout(PATIENCE_S),
        ):
            await asyncio.wait({by_a, by_b}, return_when=asyncio.FIRST_COMPLETED)
            victim = "gateway-a" if by_a.done() else "gateway-b"
        witness.mesh.kill(victim)
        if back:
            witness.mesh.start(victim)
    assert (await witness.record(job)).state is not JobState.DONE, "the fault came too late"
    await check(witness, job)
    same_pids(witness, job)
    assert others.keys() - witness.mesh.alive().keys() == {victim}


# --- the bus ---------------------------------------------------------------------------------------------


async def test_the_bus_is_killed_and_back_after_five_seconds(witness: Witness) -> None:
    job = await witness.submit(spec("bus-killed"))
    await struck(witness, job, subjects.STEP_PREPARE)
    processes, before = witness.mesh.alive(), await witness.leader()
    server = witness.mesh.servers[0]
    await server.kill()
    assert not server.running
    await witness.bus_gone()
    await asyncio.sleep(OUTAGE_S)  # the outage itself
    await server.start()
    record = await check(witness, job)
    same_pids(witness, job)
    assert record.recoveries == 0
    assert witness.mesh.alive() == processes
    after = await witness.leader()
    assert (after.term, after.pid) == (before.term, before.pid)


async def test_one_server_of_three_is_killed_with_the_decisions_in_its_hands(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("three")
    async with EmbeddedCluster(folder / "nats", size=3, sync_always=False) as cluster:
        mesh = OwnMesh(folder, cluster.servers, replicas=copies(3))
        with mesh.running():
            async with mesh.client() as client:
                await client.ready()
                job = await client.submit(spec("server-killed"))
                await struck(client, job, subjects.STEP_PREPARE)
                processes = mesh.alive()
                info = await jetstream.call(client.bus.connection, "STREAM.INFO.KV_steps")
                assert info["config"]["num_replicas"] == 3
                leads = int(info["cluster"]["leader"].rpartition("-")[2]) - 1
                await cluster.servers[leads].kill()
                assert [server.running for server in cluster.servers].count(False) == 1
                record = await check(client, job)
                assert record.epoch == 1  # an election of the store deposes nobody
                same_pids(client, job)
                assert mesh.alive() == processes
                await cluster.servers[leads].start()


@pytest.fixture
def lonely(own: OwnMesh) -> Iterator[str]:
    """A cluster with a node, but without a router and a gateway of its own."""
    own.start("agent-lonely", ["join", "--cluster", "lonely", "--node", "n", "--slots", "2"])
    yield "lonely"
    own.retire("agent-lonely")


async def test_a_job_trains_in_a_cluster_without_a_router_though_who_serves_it_dies(
    own: OwnMesh, witness: Witness, lonely: str
) -> None:
    async def kill(sid: str) -> None:
        entry = await witness.bus.bucket(subjects.REGISTRY_RECORD).get(sid=sid)
        assert entry is not None
        assert entry.message.endpoint.cluster == lonely
        os.kill(entry.message.endpoint.pid, signal.SIGKILL)

    job = await witness.submit(
        padded(
            tiny_job(
                "lonely",
                training={"steps": 40, "checkpoint_every": 5, "validation_microbatches": 0},
                parallel={"stages": 2, "replicas": 1, "clusters": [lonely]},
            ),
            10.0,
        )
    )
    await witness.until_step(job, 6)
    await kill(f"{job}-s0-r0")
    await kill(f"{job}-data-r0")
    await witness.until_event(job, lambda event: "all back to step" in event.text)

    server = server_of(lonely, CLUSTERS)
    other = next(cluster for cluster in CLUSTERS if cluster != server)
    for kind in ("router", "gateway"):
        own.kill(f"{kind}-{server}")

    def serves(table: RouteTable) -> bool:
        return table.cluster == other and lonely in table.guests

    table = await witness.until_value(subjects.ROUTE_TABLE, serves, job=job)
    assert f"{lonely}: no router there" in table.reason
    await kill(f"{job}-s1-r0")
    await check_weights_at(witness, job)
