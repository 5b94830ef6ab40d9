"""A run's record as a mesh would have left it: one stage of two instances, one of which becomes slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from bus import subjects
from bus.recording.run_file import RunHeader, write_run
from bus.recording.run_record import Frame
from bus.subject_row import Subject
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import EntityKind, Sender
from schemas.job import JobEvent, JobState
from schemas.names import MESH
from schemas.policy import SetWeights
from tests.builders.jobs import step_event
from tests.builders.policies import decision, suggestion
from tests.builders.records import advertisement, instance
from tests.builders.telemetry import sample

JOB = "j"
SIDS = ("j-s0-r0", "j-s0-r1")
BEGAN = 1_790_000_000.0

_sender = codec.sender_map(Sender(name="someone", kind=EntityKind.INSTANCE, incarnation="i1"))


def frame(row: Subject, at: float, message: Message, id: str, **tokens: str) -> Frame:
    """`at`: seconds after `BEGAN`."""
    data = codec.encode(message, _sender, id)
    return Frame(row, round((BEGAN + at) * 1_000_000_000), row(**tokens), data)


def event(at: float, state: JobState | None = None, step: int | None = None) -> Frame:
    if step is None:
        told = JobEvent(job=JOB, kind="state", at=BEGAN + at, state=state, total_steps=60)
    else:
        told = step_event(step, at=BEGAN + at, total_steps=60, tokens=64, shares=dict.fromkeys(SIDS, 4))
    return frame(subjects.JOB_EVENT, at, told, f"e{at}", job=JOB)


def frames(seconds: int = 60, *, slow_from: int = 20) -> list[Frame]:
    """The whole run. From `slow_from` on the second instance takes three times as long."""
    found = [
        frame(subjects.ADVERTISEMENT, 0.0, advertisement(*map(instance, SIDS), full=True), "a0"),
        event(0.1, JobState.RUNNING),
    ]
    for second in range(1, seconds):
        for index, sid in enumerate(SIDS):
            service_ms = 30.0 if index and second >= slow_from else 10.0
            told = sample(sid, step=second, service_ms=service_ms)
            found.append(
                frame(
                    subjects.INSTANCE_SAMPLE,
                    second + 0.1 * index,
                    told,
                    f"s{second}-{index}",
                    job=JOB,
                    sid=sid,
                )
            )
        found.append(event(second + 0.5, step=second))
    equaliser = {"module": "equaliser", "version": "7"}
    wish = SetWeights(stage=0, weights=dict.fromkeys(SIDS, 1.0))
    said = suggestion(wish, **equaliser, confidence=0.6, reason="always", input_revision=24, valid_s=20.0)
    decided = decision("p1", **equaliser, reason="would change nothing")
    found.append(frame(subjects.SUGGESTION, 24.7, said, "p1", owner=MESH, module="equaliser"))
    found.append(frame(subjects.POLICY_DECISION, 24.71, decided, "d1", module="equaliser"))
    found.append(event(float(seconds), JobState.DONE))
    return sorted(found, key=lambda one: one.at_ns)


def write(path: Path, content: Iterable[Frame] | None = None) -> RunHeader:
    """The run's file."""

    async def each() -> AsyncIterator[Frame]:
        for one in frames() if content is None else content:
            yield one

    return asyncio.run(write_run(path, each(), job=JOB, name="uneven", steps=60, ended=True))
