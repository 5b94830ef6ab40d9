"""The closing sample is written by one process: left out where that has no room, and given time by bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from entities.orchestrator.job.model_analysis import ModelAnalysis
from entities.orchestrator.job.shared_analyses import SharedAnalyses
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import SampleWritten
from schemas.errors import Ack
from schemas.limits import SLOWEST_BYTES_PER_S
from tests.builders.graphs import node
from tests.job_context import job_context

ROOM = 4 << 30


class Asked:
    """A bus whose agent writes a sample at once. Notes the time that it was given."""

    def __init__(self) -> None:
        self.given_s: list[float] = []
        self.pulse = SimpleNamespace(timeout=self._timeout)
        self.work: ModelAnalysis | None = None

    @contextlib.asynccontextmanager
    async def _timeout(self, delay_s: float) -> AsyncIterator[None]:
        self.given_s.append(delay_s)
        yield

    async def command(self, row: object, order: Any, *, agent: str, **_: Any) -> Ack:
        assert self.work is not None
        self.work.sample_written(SampleWritten(job=order.job, text="to be"), agent)
        return Ack()


async def sample_of(weights_bytes: int, monkeypatch: Any) -> tuple[str, list[float]]:
    async def no_secrets(*_: object) -> str:
        return ""

    monkeypatch.setattr("entities.orchestrator.job.model_analysis.secrets_for", no_secrets)
    bus, mesh = Asked(), MeshView()
    there = node(slots=2)
    slots = tuple(slot.model_copy(update={"memory_bytes": ROOM // 2}) for slot in there.slots)
    await mesh.node(there.model_copy(update={"slots": slots}))
    bus.work = ModelAnalysis(job_context(bus=bus, mesh=mesh), SharedAnalyses())
    manifest: Any = SimpleNamespace(bytes=weights_bytes, url="/weights")
    return await bus.work.write_sample(manifest), bus.given_s


async def test_weights_that_no_process_can_hold_have_no_sample(monkeypatch: Any) -> None:
    assert await sample_of(ROOM + 1, monkeypatch) == ("", [])


async def test_large_weights_get_the_time_to_be_read(monkeypatch: Any) -> None:
    async with asyncio.timeout(60):
        text, (small_s,) = await sample_of(0, monkeypatch)
        assert text == "to be"
        _, (large_s,) = await sample_of(ROOM, monkeypatch)
    assert large_s == small_s + ROOM / SLOWEST_BYTES_PER_S
