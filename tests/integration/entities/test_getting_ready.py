"""What an instance says of itself while it gets ready, against a real registry."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from bus import subjects
from bus.connection import Bus
from bus.mesh.registration import RegistrationClient
from bus.server.embedded import EmbeddedServer
from bus.wire.request_progress import moved
from entities.service_registry.service import ServiceRegistry
from schemas.cluster import InstanceStart
from schemas.envelope import EntityKind
from schemas.errors import Unavailable
from schemas.registry import PASSING, PASSING_EXIT, InstanceState
from schemas.task_graph import TaskUnit, UnitKind
from tests.builders.jobs import job
from tests.builders.records import instance
from tests.integration.entities.conftest import Dial
from tests.patience import PATIENCE_S
from workers.instance import Instance, InstancePayload
from workers.stage.data_runtime import DataRuntime
from workers.stage.startup_progress import StartupConfig, reporting_progress

OFTEN = StartupConfig(report_s=0.1)


async def reason(bus: Bus) -> str:
    entry = await bus.bucket(subjects.REGISTRY_RECORD).get(sid="j-s0-r0")
    assert entry is not None
    assert entry.message.state is InstanceState.PENDING
    return str(entry.message.reason)


async def another_than(bus: Bus, before: str) -> str:
    async with asyncio.timeout(PATIENCE_S):
        while (now := await reason(bus)) == before:  # noqa: ASYNC110  # what is kept, not what was sent, counts
            await asyncio.sleep(0.05)
    return now


def compute(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


async def test_it_says_how_far_it_is_for_as_long_as_it_gets_on(registry: ServiceRegistry, dial: Dial) -> None:
    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    async with RegistrationClient(bus, instance(state=InstanceState.PENDING)) as presence:
        async with reporting_progress(presence, OFTEN):
            building = asyncio.create_task(asyncio.to_thread(compute, 1.5))
            first = await another_than(bus, "")
            assert first.startswith("getting ready: ")
            assert first.endswith(" MiB read")
            assert await another_than(bus, first) != first
            await building
        last = await reason(bus)
        await asyncio.to_thread(compute, 0.5)
        assert await reason(bus) == last, "it is ready, and still says how far it is"


async def test_who_does_nothing_says_nothing(registry: ServiceRegistry, dial: Dial) -> None:
    config = replace(OFTEN, idle_share=10.0, read_bytes=1 << 40)  # the test's own process is not idle
    bus = await dial("j-s0-r0", EntityKind.INSTANCE)
    async with (
        RegistrationClient(bus, instance(state=InstanceState.PENDING)) as presence,
        reporting_progress(presence, config),
    ):
        await asyncio.sleep(0.5)
        assert await reason(bus) == ""
        moved(1 << 20)  # of what it fetches
        assert (await another_than(bus, "")).startswith("getting ready: ")


async def test_one_that_got_on_and_then_lacked_something_passes_as_before(
    registry: ServiceRegistry, dial: Dial, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never was ready: another start may fare better, and the job is not ended for it."""

    async def build(_: DataRuntime) -> None:
        for _ in range(100):
            await asyncio.to_thread(compute, 0.05)
            if (await reason(bus)).startswith("getting ready: "):
                raise Unavailable("the store does not answer")

    monkeypatch.setattr(DataRuntime, "build", build)
    monkeypatch.setattr(Instance, "_check_code", lambda _: None)
    bus = await dial("a-client")
    unit = TaskUnit(sid="j-s0-r0", kind=UnitKind.DATA, stage=-1, replica=0)
    start = InstanceStart(
        job="j",
        epoch=1,
        unit=unit,
        slot=0,
        stages=1,
        layer_count=1,
        code_digest="",
        incarnation="i",
        spec=job().spec,
    )
    given = InstancePayload(start=start, servers=[own_server.url], cluster="a", node="n", agent="a-n")
    assert await Instance(given, OFTEN).run() == PASSING_EXIT
    entry = await bus.bucket(subjects.REGISTRY_RECORD).get(sid="j-s0-r0")
    assert entry is not None
    assert entry.message.state is InstanceState.FAULTED
    assert entry.message.reason == f"{PASSING}: the store does not answer"
