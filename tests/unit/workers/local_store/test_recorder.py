"""Draft §6.1: what is written of orders, samples and routes, and under which circumstances it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bus.subject_row import Subject
from bus.subjects import CHECKPOINT_WAIT, EXPORT, STEP_ABORT, STEP_COMMIT
from schemas.checkpoint import CheckpointFile, CheckpointWait, CheckpointWritten, StageCheckpoint
from schemas.envelope import EntityKind
from schemas.errors import Conflict
from schemas.step import (
    Exported,
    ExportOrder,
    Member,
    StepAbort,
    StepAborted,
    StepApplied,
    StepCommit,
)
from schemas.store import StoreQuery, StoreTable
from schemas.telemetry import DeviceSample, LinkSample
from schemas.weights_digest import weights_sha256
from tests.builders import steps
from tests.builders.envelopes import envelope
from tests.builders.routes import entry, table
from tests.builders.telemetry import sample
from workers.local_store import recorder
from workers.local_store.local_store import LocalStore
from workers.local_store.recorder import StoreRecorder

ME, OTHER = Member(sid="job-s0-r0", incarnation="i"), Member(sid="job-s0-r1", incarnation="o")
SMO = envelope(EntityKind.ORCHESTRATOR, "orchestrator", "smo")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    async with LocalStore(tmp_path, ME) as opened:
        yield opened


async def records(store: LocalStore, table: StoreTable) -> list[dict[str, Any]]:
    found = (await store.query(StoreQuery(job="job", table=table))).records()
    return [record for record in found if record.get("kind") != "store"]


async def obeyed(store: LocalStore, row: Subject, order: Any, answer: Any) -> None:
    async def handle(given: Any) -> Any:
        return answer

    assert await StoreRecorder(store, 0).audited(row, handle)(order, SMO) is answer


def commit(step: int) -> StepCommit:
    return steps.commit(step, job="job", epoch=2, generation=1, checksum="c5", clip=0.5)


async def test_an_applied_step_is_a_version_and_an_audited_order_once(store: LocalStore) -> None:
    entries = StoreRecorder(store, 0)

    async def handle(order: StepCommit) -> StepApplied:
        return StepApplied(member=ME, version=order.step + 1)

    serve = entries.audited(STEP_COMMIT, handle)
    await serve(commit(4), SMO)
    await serve(commit(4), SMO)  # repeated under another envelope, as a new orchestrator may
    await serve(commit(5), SMO)
    versions = await records(store, "versions")
    assert [(each["version"], each["checksum"], each["clip"]) for each in versions] == [
        (5, "c5", 0.5),
        (6, "c5", 0.5),
    ]
    (audit,) = await records(store, "audit")
    assert (audit["sender"], audit["what"], audit["outcome"]) == ("orchestrator", "step commit", "obeyed")
    assert (audit["epoch"], audit["step"], audit["count"]) == (2, 5, 3)


async def test_a_refused_order_reaches_its_sender_and_the_audit_with_its_reason(store: LocalStore) -> None:
    async def handle(order: StepCommit) -> StepApplied:
        raise Conflict("which I have not prepared")

    with pytest.raises(Conflict, match="which I have not prepared"):
        await StoreRecorder(store, 0).audited(STEP_COMMIT, handle)(commit(4), SMO)
    (audit,) = await records(store, "audit")
    assert (audit["outcome"], audit["reason"]) == ("refused", "conflict: which I have not prepared")
    assert await records(store, "versions") == []
    (event,) = await records(store, "events")
    assert event["text"] == "step commit of orchestrator: which I have not prepared"


async def test_an_order_that_breaks_or_is_cut_short_is_told_as_such(store: LocalStore) -> None:
    async def broken(order: StepCommit) -> StepApplied:
        raise ZeroDivisionError("user code")

    async def endless(order: StepCommit) -> StepApplied:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ZeroDivisionError):
        await StoreRecorder(store, 0).audited(STEP_COMMIT, broken)(commit(4), SMO)
    waiting = asyncio.create_task(_drive(StoreRecorder(store, 0).audited(STEP_COMMIT, endless)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    outcomes = [(each["outcome"], each["reason"]) for each in await records(store, "audit")]
    assert outcomes == [("failed", "ZeroDivisionError: user code"), ("failed", "cut short")]


async def _drive(serve: Any) -> None:
    await serve(commit(4), SMO)


async def test_checkpoints_and_exports_are_indexed(store: LocalStore) -> None:
    file = CheckpointFile(name="__0_0.distcp", bytes=77, sha256="00ff")
    part = StageCheckpoint(
        stage=0, folder="stage-00000", first_layer=0, last_layer=1, files=(file,), torch_version="2.13"
    )
    wait = CheckpointWait(job="job", epoch=1, url="bus://x/10")
    written = CheckpointWritten(member=ME, version=10, part=part, write_ms=1.0)
    await obeyed(store, CHECKPOINT_WAIT, wait, written)
    tensors = {"layer.weight": "float32 [2,2] 00ff"}
    await obeyed(
        store,
        EXPORT,
        ExportOrder(job="job", epoch=1, version=12, url="bus://x/final", shard="a.safetensors"),
        Exported(member=ME, version=12, url="bus://x/final", bytes=99, tensors=tensors),
    )
    first, second = await records(store, "snapshots")
    assert (first["kind"], first["version"], first["url"], first["bytes"], first["sha256"]) == (
        "checkpoint",
        10,
        "bus://x/10",
        77,
        "00ff",
    )
    assert (second["kind"], second["name"], second["sha256"]) == (
        "export",
        "a.safetensors",
        weights_sha256(tensors),
    )
    assert [each["what"] for each in await records(store, "audit")] == ["checkpoint wait", "export"]


async def test_an_abort_is_an_event_that_names_the_fenced(store: LocalStore) -> None:
    order = StepAbort(job="job", epoch=1, step=3, attempt=2, fenced=(OTHER,))
    await obeyed(store, STEP_ABORT, order, StepAborted(member=ME, version=3))
    (event,) = await records(store, "events")
    assert (event["kind"], event["text"]) == (
        "step abort",
        "step 3 goes on as attempt 2; fenced: job-s0-r1 o",
    )


async def test_samples_are_thinned_and_told_whole(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(recorder.time, "monotonic", lambda: clock)
    entries = StoreRecorder(store, 0)
    for step in range(20):
        links, device = (LinkSample(peer="x", sent_bytes=5),), DeviceSample(device="cpu")
        entries.sample(sample(ME.sid, step=step, service_ms=1.5, links=links, device=device))
        clock += entries.metrics_s / 4
    entries.event("state", "active")
    metrics = await records(store, "metrics")
    assert [each["step"] for each in metrics] == [0, 4, 8, 12, 16]
    assert (metrics[0]["service_ms"], metrics[0]["device"]) == (1.5, '{"device":"cpu"}')
    assert '"sent_bytes": 5' in metrics[0]["links"]
    assert (await records(store, "events"))[0]["step"] == 19, "an event knows the step of the last sample"


async def test_only_routes_to_the_next_stage_are_this_instances_business(store: LocalStore) -> None:
    hop = entry("job-s1-r0", incarnation="n", weight=2.0)
    entries = StoreRecorder(store, 0)
    for stage in (0, 1, 2):
        entries.routes(table(hop, job="job", stage=stage, revision=7, reason="load"))
    entries.routes(None)  # the table was removed
    (event,) = await records(store, "events")
    assert (event["kind"], event["text"]) == ("routes", "stage 1 revision 7: job-s1-r0 2 (load)")
