"""Jobs that train on a feed while records are pushed to it, and while those that wait for them are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dmsc.client.async_client import AsyncClient
from dmsc.client.client import Client
from schemas.data_account import account_of
from schemas.errors import Conflict, Unavailable
from schemas.job import JobRecord, JobSpec, JobState
from schemas.registry import InstanceState
from tests.integration.mesh.conftest import Mesh, done, losses, outcome, tiny_job, until_step
from tests.waiting import eventually

FIELDS = {"inputs": "float32[4]", "targets": "float32"}
STEPS, STEP_SAMPLES, LEFT = 4, 8, 3
"""Whole steps of the records, samples of a step, and records that make no step."""


def job(name: str, feed: str, *, parallel: Mapping[str, int] = {}, **data: Any) -> JobSpec:
    training = {
        "until": {"feed": True},
        "schedule": {"name": "constant"},
        "microbatches": 4,
        "microbatch_samples": 2,
        "checkpoint_every": 0,
        "seed": 11,
    }
    base = tiny_job(name).model_dump() | {"parallel": {**parallel}}
    model = {"factory": "sums:model", "loss": "sums:counting_loss"}
    section = {"kind": "feed", "feed": feed, **data}
    return JobSpec.model_validate(base | {"model": model, "data": section, "training": training})


def numbered(count: int = STEPS * STEP_SAMPLES + LEFT) -> list[dict[str, Any]]:
    draw = random.Random(5)
    return [
        {"inputs": [draw.gauss(0.0, 1.0) for _ in range(4)], "targets": float(number)}
        for number in range(count)
    ]


def waiting(client: Client, job: str, has: int, needs: int) -> JobRecord:
    """The job's record, once it says that it waits."""
    text = f"(has {has}, needs {needs})"

    async def found() -> JobRecord:
        async def says_so() -> JobRecord | None:
            record = await asyncio.to_thread(client.job, job)
            assert record.state not in (JobState.FAILED, JobState.DONE), record.reason
            return record if record.state is JobState.RUNNING and text in record.reason else None

        record = await eventually(says_so, lambda: f"{text}: {client.job(job).reason}")
        assert isinstance(record, JobRecord)
        return record

    return asyncio.run(found())


def check_counted(client: Client, record: JobRecord, feed: str) -> None:
    """Each record of the whole steps was seen once, and no other."""
    whole = range(STEPS * STEP_SAMPLES)
    seen = losses(client, record.job)
    assert len(seen) == STEPS
    assert sum(seen) * STEP_SAMPLES == pytest.approx(sum(whole), abs=1e-3)
    account = account_of(record)
    assert account is not None
    (source,) = account.sources
    assert (source.name, source.samples, source.epochs) == (f"feed {feed}", len(whole), None)


@pytest.fixture(scope="module")
def beforehand(mesh: Mesh) -> Iterator[str]:
    """SHA-256 of the weights of a job over the same records, pushed and closed before it began."""
    client = mesh.client
    client.create_feed("before", FIELDS)
    client.push("before", numbered())
    client.close_feed("before")
    record = outcome(client, job("feed-before", "before"))
    assert record.state is JobState.DONE, record.reason
    assert record.weights is not None
    check_counted(client, record, "before")
    assert record.progress.because == f"feed before ends before step {STEPS}"
    yield record.weights.sha256
    client.delete_feed("before")


def push_twice(client: Client, feed: str, records: Sequence[Mapping[str, Any]], key: str) -> None:
    """As whoever got no answer to the first one, whether a gateway is there or not."""

    async def pushed() -> int | None:
        with contextlib.suppress(Unavailable):
            return 1 + (await asyncio.to_thread(client.push, feed, records, idempotency_key=key)).first
        return None

    answers = {asyncio.run(eventually(pushed)) for _ in range(2)}
    assert len(answers) == 1


def test_records_pushed_during_training_and_kills_in_mid_wait(mesh: Mesh, beforehand: str) -> None:
    client, records = mesh.client, numbered()
    client.create_feed("live", FIELDS)
    name = client.submit(job("feed-live", "live", parallel={"stages": 2, "replicas": 2})).job
    waiting(client, name, 0, STEP_SAMPLES)
    assert f"waits for records of feed live (has 0, needs {STEP_SAMPLES})" in mesh.printed("jobs")
    push_twice(client, "live", records[:13], "first")
    until_step(client, name, 0)
    waiting(client, name, 13, 2 * STEP_SAMPLES)

    reader = mesh.instance(f"{name}-data-r0")
    os.kill(reader.endpoint.pid, signal.SIGKILL)

    async def replaced() -> bool:
        async with AsyncClient(state=mesh.state) as other:
            found = await other.instance(reader.sid)
        return found.incarnation != reader.incarnation and found.state is InstanceState.ACTIVE

    asyncio.run(eventually(replaced))
    part = "control-plane"  # both gateways, the orchestrator and all the rest
    before = mesh.children[part]
    os.kill(before, signal.SIGKILL)
    push_twice(client, "live", records[13:14], "second")
    asyncio.run(eventually(lambda: mesh.children.get(part, before) != before))
    push_twice(client, "live", records[14:20], "third")
    until_step(client, name, 1)
    waiting(client, name, 20, 3 * STEP_SAMPLES)
    parked = client.park(name)
    asyncio.run(eventually(lambda: client.job(name).state is JobState.PARKED))
    assert parked.job == name
    push_twice(client, "live", records[20:], "last")
    client.close_feed("live")
    with pytest.raises(Conflict, match="feed live is closed"):
        client.push("live", records[:1])
    client.resume(name)
    record = done(client, name)
    assert record.weights is not None
    assert record.weights.sha256 == beforehand
    assert record.recoveries >= 1
    check_counted(client, record, "live")
    (row,) = (line for line in mesh.printed("jobs").splitlines() if name in line)
    assert f" {STEPS} " in row
    assert "–" not in row, "how many steps it has is known at its end"
    client.delete_feed("live")


def test_a_job_that_waits_long_has_a_checkpoint_of_its_last_step(mesh: Mesh) -> None:
    """So that whatever dies in days of waiting costs no step."""
    client, records = mesh.client, numbered()
    client.create_feed("paused", FIELDS)
    spec = job("feed-paused", "paused")
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"checkpoint_every": 100})})
    name = client.submit(spec).job
    client.push("paused", records[:STEP_SAMPLES])
    written = next(event for event in client.events(name) if event.kind == "checkpoint")
    assert written.text.startswith("step 1 at ")
    assert "why: the job waits for records" in written.text
    waiting(client, name, STEP_SAMPLES, 2 * STEP_SAMPLES)
    os.kill(mesh.instance(f"{name}-s0-r0").endpoint.pid, signal.SIGKILL)
    back = next(event for event in client.events(name) if event.kind == "recovery")
    assert "all back to step 1" in back.text
    client.push("paused", records[STEP_SAMPLES:])
    client.close_feed("paused")
    check_counted(client, done(client, name), "paused")
    client.delete_feed("paused")


def test_a_chain_waits_and_a_feed_that_is_deleted_ends_its_job(mesh: Mesh, tmp_path: Path) -> None:
    client, records = mesh.client, numbered()
    created = mesh.printed("data", "create", "gone", *(f"{name}={kind}" for name, kind in FIELDS.items()))
    assert created == "feed gone: inputs=float32[4], targets=float32\n"
    file = tmp_path / "first.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records[:STEP_SAMPLES]))
    chain = [{"name": "same", "function": "normalize", "args": {"fields": ["inputs"], "mean": 0, "std": 1}}]
    name = client.submit(job("feed-gone", "gone", preprocess=chain, shuffle_window=3)).job
    for _ in range(2):
        pushed = mesh.printed("data", "push", "gone", str(file), "--key", "first")
        assert pushed == f"{STEP_SAMPLES} records pushed; feed gone has {STEP_SAMPLES}\n"
    assert "open" in mesh.printed("data", "feeds")
    waiting(client, name, STEP_SAMPLES, STEP_SAMPLES + 1)  # two windows of three, and one more
    client.push("gone", records[STEP_SAMPLES:11])
    until_step(client, name, 0)
    waiting(client, name, 11, 18)
    assert mesh.printed("data", "delete", "gone") == "feed gone is deleted\n"
    record = client.wait(name)
    assert record.state is JobState.FAILED
    assert record.reason == "data.feed: feed gone was deleted, and the job needs its records"
