"""A run is read from all streams in the order of the server's clock, and nothing of other jobs with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus import subjects
from bus.recording import run_record
from bus.recording.run_file import RunFile, write_run
from schemas.errors import NotFound
from schemas.job import JobEvent, JobState
from schemas.learnt_state import LearntState, digest_of
from schemas.names import MESH
from schemas.policy import NoAction, PolicySuggestion
from schemas.telemetry import InstanceSample, LogLine, NodeSample
from tests.conftest import Connect
from tests.recorded import until_recorded


def sample(job: str, step: int) -> InstanceSample:
    return InstanceSample(
        job=job, sid=f"{job}-s0-r0", incarnation="i", cluster="c", node="n", stage=0, step=step
    )


def suggestion(job: str) -> PolicySuggestion:
    return PolicySuggestion(
        module="m",
        version="1",
        job=job,
        action=NoAction(),
        confidence=0.5,
        reason="r",
        input_revision=1,
        valid_s=1.0,
    )


def learnt(version: str, revision: int) -> LearntState:
    fields = {"module": "m", "version": version, "revision": revision, "schema_version": 1, "by": "i"}
    return LearntState(**fields, data="{}", digest=digest_of("{}"), at=1.0)


async def test_a_run_is_what_concerns_it_in_order(connect: Connect, tmp_path: Path) -> None:
    bus = await connect("someone")

    async def event(job: str, state: JobState) -> None:
        await bus.append(subjects.JOB_EVENT, JobEvent(job=job, kind="state", at=0.0, state=state), job=job)

    await bus.publish(subjects.NODE_SAMPLE, NodeSample(cluster="c", node="n"), agent="c-n")
    for revision in (1, 2):
        for version in ("1", "2"):
            await bus.publish(subjects.LEARNT_STATE, learnt(version, revision), owner=MESH, module="m")
    await until_recorded(bus, subjects.LEARNT_STATE, 4)  # the streams store beside each other
    for job in ("run1", "run2"):
        await event(job, JobState.RUNNING)
    for step in range(300):  # more than one batch
        for job in ("run1", "run2"):
            await bus.publish(subjects.INSTANCE_SAMPLE, sample(job, step), job=job, sid=f"{job}-s0-r0")
        if step % 50 == 0:
            await bus.barrier()
            await bus.publish(subjects.NODE_SAMPLE, NodeSample(cluster="c", node="n"), agent="c-n")
            for job in ("run1", "run2"):
                await bus.publish(subjects.SUGGESTION, suggestion(job), owner=MESH, module="m")
            await bus.publish(subjects.LOG, LogLine(level="info", event="said"), sid="someone")
            await bus.barrier()
    running = await run_record.span_of(bus, "run1")
    assert not running.ended
    await event("run1", JobState.DONE)

    span = await run_record.span_of(bus, "run1")
    assert span.ended
    frames = [frame async for frame in run_record.read_run(bus, "run1", span)]
    assert [frame.at_ns for frame in frames] == sorted(frame.at_ns for frame in frames)
    of = {row.name: [frame for frame in frames if frame.row is row] for row in run_record.RECORDED}
    assert {name: len(found) for name, found in of.items() if found} == {
        "job event": 2,
        "instance sample": 300,
        "node sample": 7,
        "policy suggestion": 6,
        "learnt state": 4,
    }
    steps = [frame.open()[0].step for frame in of["instance sample"]]
    assert steps == list(range(300))
    assert {frame.open()[0].job for frame in of["policy suggestion"]} == {"run1"}
    assert all(span.began - 12 <= frame.at <= span.until + 5 for frame in frames)

    begins = [frame async for frame in run_record.read_run(bus, "run1", span, before_s=0.0)]
    states = [frame.open()[0] for frame in begins if frame.row is subjects.LEARNT_STATE]
    assert [(state.version, state.revision) for state in states] == [("1", 2), ("2", 2)], "the last before it"

    counts = await run_record.counts(bus)
    assert counts["run1"] == {"job event": 2, "instance sample": 300}
    assert counts["run2"]["job event"] == 1

    path = tmp_path / "run1.dmscrun"
    await write_run(path, run_record.read_run(bus, "run1", span), job="run1", name="n", steps=300, ended=True)
    with RunFile.open(path) as run:
        assert list(run.frames()) == frames


async def test_a_job_without_a_record_is_not_found(connect: Connect) -> None:
    bus = await connect("someone")
    with pytest.raises(NotFound, match="nothing is recorded of a job nobody: `dmsc runs recorded`"):
        await run_record.span_of(bus, "nobody")
