"""Draft §6: what an instance keeps is read over the bus, and its next incarnation goes on from there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from bus.connection import Bus
from bus.subjects import STEP_COMMIT
from dmsc.console.exit_codes import ExitCode
from policies.kit.instance_store import InstanceStore, StoredEvent
from schemas.envelope import EntityKind
from schemas.errors import BadInput, Fenced, NotFound, Unavailable
from schemas.step import StepCommit
from schemas.store import StoreQuery
from tests.integration.mesh.conftest import Mesh, done, running_mesh, tiny_job, until_step
from tests.integration.mesh.user_jobs import held_job, words
from tests.patience import PATIENCE_S
from tests.waiting import eventually
from workers.local_store.store_file import StoreFile
from workers.local_store.store_schema import StoreLimits

HELD_AT = 4
"""The step at which the job is held, so that its instances can be asked and killed in peace."""
STEPS = HELD_AT + 33
"""It is held before it comes to its end."""


def submit_and_hold(mesh: Mesh, folder: Path, gate: Path) -> str:
    """A job of two stages with two replicas each that trains, checkpoints, and then hardly moves."""
    spec = held_job(
        words(folder),
        gate,
        training={"steps": STEPS, "checkpoint_every": 3},
        parallel={"stages": 2, "replicas": 2, "segmentation": "uniform", "clusters": ["a"]},
    )
    job = mesh.client.submit(spec).job
    until_step(mesh.client, job, HELD_AT)
    gate.touch()
    return job


async def test_a_store_is_read_over_the_bus_and_outlives_its_instance(mesh: Mesh, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    try:
        job = await asyncio.to_thread(submit_and_hold, mesh, tmp_path, gate)
        async with mesh.bus("reader") as bus:
            store = InstanceStore(bus, job=job, sid=f"{job}-s0-r0")
            await check_contents(bus, job, store)
            await check_refusal(mesh, store)
            await asyncio.to_thread(check_command, mesh, job)
            await check_the_next_incarnation(mesh, store)
            (folder,) = (mesh.state / "stores").glob(f"a-*/{job}")
            assert (folder / store.sid / "store.sqlite").exists()
            gate.unlink()
            assert (await asyncio.to_thread(done, mesh.client, job)).recoveries >= 1
            await eventually(lambda: not folder.exists())  # another process removes it
            with pytest.raises(NotFound, match=r"is not there: .* --keep-stores"):
                await store.events()
        gone = await asyncio.to_thread(mesh.dmsc, "store", job, "s0-r0")
        assert gone.returncode == ExitCode.BAD_INPUT
        assert gone.stderr.startswith(f"dmsc: {job}-s0-r0 of {job} is not there: ")
        assert len(gone.stderr.splitlines()) == 1
    finally:
        gate.unlink(missing_ok=True)


async def check_contents(bus: Bus, job: str, store: InstanceStore) -> None:
    """§6.1: configuration and dependencies, metrics, events, versions, snapshots, audit."""
    configuration = await store.configuration()
    assert configuration["job"]["training"]["checkpoint_every"] == 3
    assert configuration["unit"]["sid"] == store.sid
    assert configuration["dependencies"]["torch"]
    assert len(configuration["code_digest"]) == 64
    assert configuration["place"]["cluster"] == "a"
    states = [event.text for event in await store.events(where={"kind": "state"})]
    assert states == ["pending: it builds its part", "active: ready"]
    assert [event.text for event in await store.events(where={"kind": "group form"})]
    versions = await store.versions()
    assert [each.version for each in versions] == list(range(1, len(versions) + 1))
    assert len(versions) > HELD_AT
    assert {each.action for each in versions} == {"apply"}
    assert all(each.checksum for each in versions)
    other = InstanceStore(bus, job=job, sid=f"{job}-s0-r1")
    assert [each.checksum for each in await other.versions(limit=5)] == [
        each.checksum for each in versions[:5]
    ]
    async with asyncio.timeout(PATIENCE_S):  # a sample comes once a second
        while (metrics := await store.metrics(newest=True, limit=1))[-1].step < 1:  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0.1)
    assert metrics[0].resident_bytes > 0
    assert json.loads(metrics[0].device or "{}")["device"] == "cpu"
    async with asyncio.timeout(PATIENCE_S):  # a checkpoint is written beside the steps
        while not (snapshots := await store.snapshots() + await other.snapshots()):  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0.1)
    assert snapshots[0].version == 3
    assert {each.kind for each in snapshots} == {"checkpoint"}
    assert all(each.url and each.bytes > 0 for each in snapshots)
    orders = await store.audit(limit=1000)
    assert {each.sender for each in orders} == {"orchestrator"}
    assert {each.outcome for each in orders} == {"obeyed"}
    commits = [each for each in orders if each.what == "step commit"]
    more = sum(each.count for each in commits) - len(versions)
    assert more in (0, 1), "one may have come since the versions were read"
    assert commits[-1].step == versions[-1].version - 1 + more
    data = InstanceStore(bus, job=job, sid=f"{job}-data-r0")
    dispatches = await data.audit(where={"what": "step dispatch"})
    assert {each.sender for each in dispatches} in ({"gateway-a"}, {"gateway-b"}), (
        "the job's entry, wherever that is"
    )
    with pytest.raises(BadInput, match="events has no column 'secret'"):
        await store.rows("events", columns=("secret",))


async def check_refusal(mesh: Mesh, store: InstanceStore) -> None:
    """An order of an older epoch is refused, and the audit knows whose it was and why."""
    stale = StepCommit(
        job=store.job, epoch=0, step=3, attempt=0, generation=0, checksum="x", clip=1.0, action="apply"
    )
    async with mesh.bus("reader", EntityKind.ORCHESTRATOR) as bus:
        with pytest.raises(Fenced):
            await bus.command(STEP_COMMIT, stale, job=store.job, sid=store.sid)
    (refused,) = await store.audit(where={"outcome": "refused"})
    assert (refused.sender, refused.sender_kind, refused.what) == ("reader", "orchestrator", "step commit")
    assert (refused.epoch, refused.step, refused.count) == (0, 3, 1)
    assert refused.reason.startswith("fenced: epoch 0 speaks to an instance of epoch ")
    (event,) = await store.events(where={"kind": "refusal"})
    assert event.text.startswith("step commit of reader: epoch 0 speaks")


def check_command(mesh: Mesh, job: str) -> None:
    columns = ("--table", "versions", "-c", "version", "-c", "action", "-n", "3")
    shown = mesh.dmsc("store", job, "s0-r0", *columns)
    assert shown.returncode == 0, shown.stderr
    head, *lines = shown.stdout.splitlines()
    assert head.split() == ["version", "action"]
    assert [line.split()[1] for line in lines] == ["apply"] * 3
    assert shown.stderr.startswith("dmsc: there are more rows (older: ")
    told = mesh.dmsc("store", job, f"{job}-s0-r0", "-t", "audit", "-w", "outcome=refused", "--json")
    (refused,) = json.loads(told.stdout)
    assert refused["sender"] == "reader"
    wrong = mesh.dmsc("store", job, "s0-r0", "--column", "secret")
    assert wrong.returncode == ExitCode.BAD_INPUT
    assert wrong.stderr.startswith("dmsc: events has no column 'secret'; there are: id, at, ")


async def check_the_next_incarnation(mesh: Mesh, store: InstanceStore) -> None:
    before = await store.events(newest=True, limit=1)
    versions = await store.versions()
    former = before[0].incarnation
    os.kill((await asyncio.to_thread(mesh.instance, store.sid)).endpoint.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while not is_there(after := await events_after(store, before[0].id), former):  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0.1)
    assert [each.id for each in after] == list(range(before[0].id + 1, before[0].id + 1 + len(after)))
    mine = [each for each in after if each.incarnation != former]
    assert after[-len(mine) :] == mine, "its rows follow the former's"
    assert {each.incarnation for each in mine} == {mine[0].incarnation}
    assert mine[0].kind == "store"
    assert mine[0].text.startswith(f"goes on after incarnation {former}, whose last event was ")
    kept = await store.versions(where={"incarnation": former})
    assert [each.version for each in kept[: len(versions)]] == [each.version for each in versions]
    there = await asyncio.to_thread(mesh.instance, store.sid)
    assert (await store.configuration())["place"]["pid"] == there.endpoint.pid


async def events_after(store: InstanceStore, after_id: int) -> list[StoredEvent]:
    """Nothing while the instance is away."""
    try:
        return await store.events(after_id=after_id)
    except (NotFound, Unavailable):
        return []


def is_there(events: list[StoredEvent], former: str) -> bool:
    """Whether the next incarnation runs and has joined its stage's group."""
    return {"store", "state", "group form"} <= {each.kind for each in events if each.incarnation != former}


def test_a_store_is_kept_where_the_operator_wants_that(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMSC_KEEP_STORES", "1")
    state = tmp_path_factory.mktemp("kept") / "state"
    with running_mesh(state, "--slots", "1", "--cluster", "a") as mesh:
        record = done(mesh.client, mesh.client.submit(tiny_job("kept", training={"steps": 3})).job)
    (folder,) = (state / "stores").glob(f"a-*/{record.job}/{record.job}-s0-r0")
    file = StoreFile(folder, StoreLimits())
    assert file.open() == ""
    exported = StoreQuery(job=record.job, table="snapshots", where={"kind": "export"}, columns=("sha256",))
    assert file.read(exported).rows == ((record.weights.sha256,),), "one stage: its digest is the job's"
    applied = file.read(StoreQuery(job=record.job, table="versions", limit=1000, columns=("version",)))
    assert [row[0] for row in applied.rows] == list(range(1, record.spec.training.steps + 1))
    last = file.read(StoreQuery(job=record.job, table="events", newest=True, limit=1, columns=("text",)))
    assert last.rows == (("draining: stopping",),), "nothing that was recorded before the end is missing"
    file.close()
