"""Garbage in what a guarded mesh keeps: users, revocations, secrets, data sets, meetings, objects' records.

The guard goes on letting in who may come, and nobody else; a job under way comes to the same weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bus import subjects
from bus.connection import Bus
from bus.messaging import rendezvous, streams
from bus.nats import jetstream
from bus.nats.ordered_consumer import OrderedConsumer
from bus.subject_row import Subject
from dmsc.client.client import Client
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from schemas.job import JobSpec, JobState
from tests.integration.dmsc.command_line import dmsc
from tests.integration.mesh.conftest import Mesh, padded, start_mesh, stop_mesh, tiny_job
from tests.integration.mesh.test_faults import pid_of
from tests.integration.mesh.undisturbed import undisturbed
from tests.patience import PATIENCE_S

ROWS: tuple[Subject, ...] = (
    subjects.USER_RECORD,
    subjects.REVOCATION,
    subjects.SECRET,
    subjects.DATASET_OWNER,
)
OBJECTS = f"$O.{streams.OBJECT_BUCKET}.M.>"
GARBAGE = (b"\xc1\x00garbage", b"", b"{}")
STRUCK = ("s0-r0", "s1-r0", "s0-r1")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    mesh = start_mesh(tmp_path / "state", "--slots", "4")
    try:
        yield mesh
    finally:
        assert stop_mesh(mesh) == 0


def spec(name: str) -> JobSpec:
    """Padded, so that what is written over finds it at work."""
    job = tiny_job(
        name,
        training={"steps": 30, "checkpoint_every": 4},
        parallel={"stages": 2, "replicas": 2},
    )
    return padded(job, pad_ms=20.0)


async def spoil(mesh: Mesh, kind: EntityKind, stream: str, pattern: str, garbage: bytes) -> int:
    """Over every key; how many there were."""
    async with Bus.connect(mesh.servers, name="spoiler", kind=kind, token=mesh.bus_token) as bus:
        async with OrderedConsumer.open(bus.connection, stream, pattern) as reader:
            keys = {item.subject async for item in reader.present() if not item.is_marker}
        for key in keys:
            with contextlib.suppress(DmscError):
                await jetstream.publish(bus.connection, key, garbage)
        assert bus.counters.denied == 0
    return len(keys)


async def spoil_all(mesh: Mesh, garbage: bytes) -> dict[str, int]:
    found = {
        row.name: await spoil(mesh, min(row.senders), f"KV_{row.bucket}", row.wildcard(), garbage)
        for row in ROWS
    }
    meetings = rendezvous.subjects_of(None)[0]
    broker = EntityKind.BROKER
    found["meetings"] = await spoil(mesh, broker, rendezvous.VALUES_STREAM, meetings, garbage)
    found["objects"] = await spoil(mesh, EntityKind.GATEWAY, f"OBJ_{streams.OBJECT_BUCKET}", OBJECTS, garbage)
    return found


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s"
        time.sleep(0.05)


def done(mesh: Mesh, job: str) -> None:
    record = mesh.client.wait(job, timeout_s=PATIENCE_S)
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    assert record.weights.sha256 == undisturbed(mesh.client, record.spec)


def test_garbage_stops_neither_a_guarded_mesh_nor_its_job(mesh: Mesh, tmp_path: Path) -> None:
    def command(*words: str, **more: str) -> str:
        said = dmsc(*words, "--state", str(mesh.state), cwd=tmp_path, **more)
        assert said.returncode == 0, said.stderr
        return said.stdout

    tokens = {name: json.loads(command("user", "add", name, "--json"))["token"] for name in ("uma", "una")}
    command("user", "revoke", "una")
    command("secret", "set", "store", "--from-env", "STORE", STORE="s3://k:v@host/bucket")
    mesh.client.upload_dataset("words", Path(__file__))
    job = mesh.client.submit(spec("spoilt")).job
    for number, garbage in enumerate(GARBAGE):
        until(lambda step=4 * number + 5: mesh.client.job(job).step >= step, "a step")
        found = asyncio.run(spoil_all(mesh, garbage))
        assert all(found.values()), found
        os.kill(pid_of(mesh, f"{job}-{STRUCK[number]}"), signal.SIGKILL)  # who comes has to meet the others
    done(mesh, job)
    with Client(state=mesh.state, token=tokens["uma"]) as uma:
        assert uma.jobs() is not None
    with Client(state=mesh.state, token=tokens["una"]) as una, pytest.raises(DmscError):
        una.jobs()
    assert "store" in command("secret", "list")
    assert [one.name for one in mesh.client.datasets()] == ["words"]
    noted = {note.bucket for note in mesh.client.mesh().unreadable}
    assert {"users", "revocations"} <= noted, noted
    assert "✗ records: " in dmsc("doctor", "--state", str(mesh.state), cwd=tmp_path).stdout
    done(mesh, mesh.client.submit(spec("next")).job)
