"""Garbage in what a guarded mesh keeps: users, revocations, secrets, data sets, meetings, objects' records.

The guard goes on letting in who may come, and nobody else; a job under way comes to the same weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus import subjects
from bus.messaging import rendezvous, streams
from bus.nats import jetstream
from bus.nats.ordered_consumer import OrderedConsumer
from bus.subject_row import Subject
from dmsc.client.client import Client
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from schemas.job import JobSpec
from tests.integration.dmsc.command_line import wait_for
from tests.integration.mesh.conftest import Mesh, padded, running_mesh, tiny_job
from tests.integration.mesh.expected_weights import check_weights

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
    with running_mesh(tmp_path / "state", "--slots", "4") as mesh:
        yield mesh


def spec(name: str) -> JobSpec:
    """Padded, so that what is written over finds it at work."""
    training = {"steps": 30, "checkpoint_every": 4}
    return padded(tiny_job(name, training=training, parallel={"stages": 2, "replicas": 2}), pad_ms=20.0)


async def spoil(mesh: Mesh, kind: EntityKind, stream: str, pattern: str, garbage: bytes) -> int:
    """Over every key; how many there were."""
    async with mesh.bus("spoiler", kind) as bus:
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


def test_garbage_stops_neither_a_guarded_mesh_nor_its_job(mesh: Mesh) -> None:
    tokens = {
        name: json.loads(mesh.printed("user", "add", name, "--json"))["token"] for name in ("uma", "una")
    }
    mesh.printed("user", "revoke", "una")
    mesh.printed("secret", "set", "store", "--from-env", "STORE", STORE="s3://k:v@host/bucket")
    mesh.client.upload_dataset("words", Path(__file__))
    job = mesh.client.submit(spec("spoilt")).job
    for number, garbage in enumerate(GARBAGE):
        wait_for(lambda step=4 * number + 5: mesh.client.job(job).step >= step, "a step")
        found = asyncio.run(spoil_all(mesh, garbage))
        assert all(found.values()), found
        victim = mesh.instance(f"{job}-{STRUCK[number]}")
        os.kill(victim.endpoint.pid, signal.SIGKILL)  # who comes has to meet the others
    check_weights(mesh.client, job)
    with Client(state=mesh.state, token=tokens["uma"]) as uma:
        assert uma.jobs() is not None
    with Client(state=mesh.state, token=tokens["una"]) as una, pytest.raises(DmscError):
        una.jobs()
    assert "store" in mesh.printed("secret", "list")
    assert [one.name for one in mesh.client.datasets()] == ["words"]
    noted = {note.bucket for note in mesh.client.mesh().unreadable}
    assert {"users", "revocations"} <= noted, noted
    assert "✗ records: " in mesh.dmsc("doctor").stdout
    check_weights(mesh.client, mesh.client.submit(spec("next")).job)
