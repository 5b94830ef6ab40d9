"""What a stage of very many tensors exports is told in pages, none of which is a large answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.subjects import EXPORT
from entities.orchestrator.checkpointing.weight_export import MOST_TENSORS, export_weights
from entities.orchestrator.job_state.instances import JobInstances
from schemas.envelope import EntityKind, Envelope
from schemas.errors import BadMessage
from schemas.job import JobSpec
from schemas.job_file.model import ModelSpec
from schemas.job_file.training import TrainingSpec
from schemas.step import Exported, ExportOrder, Member
from schemas.weights_digest import tensor_line, weights_sha256
from tests.builders.jobs import job
from tests.job_context import job_context
from workers.state.weights import page_of

WRITER = Member(sid="j-s0-r0", incarnation="i")
LINES = {
    f"layers.{number // 9}.experts.{number % 9}.projection.weight": tensor_line("float32", [8], "0" * 64)
    for number in range(20_000)
}


async def exported(own_server: EmbeddedServer, answer: Any) -> Any:
    spec = JobSpec(
        name="j",
        model=ModelSpec(factory="workers.models.gpt:byte_gpt"),
        training=TrainingSpec(steps=1),
        artifacts="bus://artifacts",
    )
    async with (
        Bus.connect(own_server.url, name="orchestrator", kind=EntityKind.ORCHESTRATOR) as bus,
        Bus.connect(own_server.url, name=WRITER.sid, kind=EntityKind.INSTANCE) as instance,
    ):
        await bus.provision()
        await instance.serve(EXPORT, answer, job="j", sid=WRITER.sid)
        record = job("j").model_copy(update={"spec": spec, "epoch": 1})
        instances = JobInstances(bus, cast(Any, None), record)
        instances.graph = cast(Any, SimpleNamespace(units=()))
        found = await export_weights(job_context(record, bus=bus, instances=instances), [[WRITER]], 7)
        assert bus.counters.dead_letters == 0
        return found


async def test_all_tensors_arrive_in_several_pages(own_server: EmbeddedServer) -> None:
    orders: list[ExportOrder] = []

    async def tell(order: ExportOrder, envelope: Envelope) -> Exported:
        orders.append(order)
        assert order.after is not None
        page = page_of(LINES, order.after)
        return Exported(
            member=WRITER, version=7, url=order.url, bytes=9, tensors=page, more=max(page) < max(LINES)
        )

    found = await exported(own_server, tell)
    assert len(orders) > 3
    assert set(found.tensors) == set(LINES)
    assert found.sha256 == weights_sha256(LINES)
    assert found.bytes == 9


async def test_an_instance_that_never_ends_telling_is_not_listened_to(own_server: EmbeddedServer) -> None:
    told = 0

    async def tell(order: ExportOrder, envelope: Envelope) -> Exported:
        nonlocal told
        page = {f"{number:012d}": "" for number in range(told, told + 60_000)}
        told += len(page)
        return Exported(member=WRITER, version=7, url=order.url, bytes=9, tensors=page, more=True)

    with pytest.raises(BadMessage, match=f"more than {MOST_TENSORS:,} tensors"):
        await exported(own_server, tell)
    assert told < MOST_TENSORS + 60_001


async def test_one_that_tells_the_same_again_has_told_all(own_server: EmbeddedServer) -> None:
    asked = 0

    async def tell(order: ExportOrder, envelope: Envelope) -> Exported:
        nonlocal asked
        asked += 1
        return Exported(member=WRITER, version=7, url=order.url, bytes=9, tensors={"a": "b"}, more=True)

    assert (await exported(own_server, tell)).tensors.keys() == {"a"}
    assert asked == 2
