"""The tracer on a real bus, which fails it between a job's event and the job's record."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bus.connection import Bus
from bus.messaging.key_value import Bucket
from bus.subjects import JOB_EVENT, JOB_RECORD
from dmsc.tracing.spans import TraceSpan
from dmsc.tracing.tracer import Tracer
from schemas.errors import BusUnreachable
from schemas.job import JobEvent, JobState
from tests.builders import job_events as events
from tests.conftest import Connect
from tests.patience import PATIENCE_S
from tests.waiting import beside


async def test_a_job_whose_record_cannot_be_read_just_now_is_traced_nevertheless(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus: Bus = await connect("tracer")
    get, failed = Bucket.get, []

    async def unreachable_once(bucket: Bucket, **tokens: Any) -> Any:
        if not failed:
            failed.append(tokens)
            raise BusUnreachable("the connection to the bus broke")
        return await get(bucket, **tokens)

    monkeypatch.setattr(Bucket, "get", unreachable_once)
    await bus.bucket(JOB_RECORD).put(events.record(), job=events.JOB)
    spans: list[TraceSpan] = []
    told = asyncio.Event()

    def export(span: TraceSpan) -> None:
        spans.append(span)
        told.set()

    async with beside(Tracer(bus, export).run()):
        for state in (JobState.QUEUED, JobState.CANCELLED):
            event = JobEvent(job=events.JOB, kind="state", at=time.time() + 1, state=state, text="")
            await bus.append(JOB_EVENT, event, job=events.JOB)
        async with asyncio.timeout(PATIENCE_S):
            while "job" not in {span.name for span in spans}:
                await told.wait()
                told.clear()
    assert failed == [{"job": events.JOB}]
    assert [span.name for span in spans] == ["queued", "job"]
