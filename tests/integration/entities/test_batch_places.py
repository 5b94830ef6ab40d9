"""Which batches a gateway works on, and how they end: none holds up another for longer than it works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from bus import subjects
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.batches.batch_runner import BatchConfig
from schemas.envelope import EntityKind
from schemas.services.batches import StoredFile
from schemas.services.model_service import VersionState
from tests.integration.entities.conftest import Dial, Start
from tests.integration.entities.serving_stand_in import Served, StandInInstance, answer_to, deploy
from tests.integration.entities.test_batches import RUTH, content, create, lines_of, over, request, upload
from tests.patience import PATIENCE_S
from tests.waiting import eventually


@pytest_asyncio.fixture
async def narrow(served: Served, dial: Dial, start: Start) -> Gateway:
    """A gateway that works on one batch at a time, and looks often."""
    config = BatchConfig(most=1, stuck_s=0.2, look_s=0.05, again_s=0.01)
    gateway = Gateway(
        await dial("gateway-west", EntityKind.GATEWAY),
        GatewayConfig(cluster="west", http_port=0, batches=config),
    )
    await start(gateway)
    await deploy(served.bus, "naps", job="naps1", stages=1, state=VersionState.IDLE)
    await eventually(lambda: gateway.generations.book.get("naps") and gateway.jobs.cache.get("naps1"))
    await eventually(lambda: gateway.generations.book.get("letters") and gateway.jobs.cache.get("serve1"))
    return gateway


@pytest_asyncio.fixture
async def west(narrow: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    assert narrow.url is not None
    async with httpx.AsyncClient(base_url=narrow.url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


async def batch_of(http: httpx.AsyncClient, *requests: dict[str, Any], **more: Any) -> str:
    created = await create(http, await upload(http, lines_of([*requests])), **more)
    assert created.status_code == 200, created.text
    return str(created.json()["id"])


async def status_of(http: httpx.AsyncClient, batch: str) -> str:
    return str((await http.get(f"/v1/batches/{batch}", headers=RUTH)).json()["status"])


async def test_a_batch_whose_version_sleeps_takes_no_place(
    served: Served, west: httpx.AsyncClient, narrow: Gateway, dial: Dial
) -> None:
    asleep = [await batch_of(west, request(number, model="naps")) for number in range(3)]
    awake = await batch_of(west, request(0))
    assert (await over(west, awake)).status == "completed"
    assert [await status_of(west, batch) for batch in asleep] == ["in_progress"] * 3
    # It has its version start, and holds none of the requests that people could hold.
    assert narrow.generations.held.waiting == 0
    instance = StandInInstance(await dial("naps1-s0-r0", EntityKind.INSTANCE), "naps1-s0-r0", 1)
    await instance.start()
    await deploy(served.bus, "naps", job="naps1", stages=1, state=VersionState.READY)
    for number, batch in enumerate(asleep):
        view = await over(west, batch)
        (line,) = await content(west, view.output_file_id)
        assert line["response"]["body"]["choices"][0]["text"] == answer_to(f"p{number}", 3)
    await instance.kill()


async def test_a_batch_that_can_not_go_on_gives_its_place_and_keeps_its_answers(
    served: Served, west: httpx.AsyncClient, narrow: Gateway, dial: Dial
) -> None:
    begun: list[int] = []

    async def gate(number: int) -> None:
        if not number:
            begun.append(number)

    served.gate(gate)
    first = await batch_of(west, request(0), request(1, model="naps"), request(2))
    await eventually(lambda: len(begun) == 2)
    second = await batch_of(west, request(3))
    assert (await over(west, second)).status == "completed"
    assert await status_of(west, first) == "in_progress"
    instance = StandInInstance(await dial("naps1-s0-r0", EntityKind.INSTANCE), "naps1-s0-r0", 1)
    await instance.start()
    await deploy(served.bus, "naps", job="naps1", stages=1, state=VersionState.READY)
    view = await over(west, first)
    lines = await content(west, view.output_file_id)
    assert [each["custom_id"] for each in lines] == ["id-0", "id-1", "id-2"]
    assert len(begun) == 3, "no request was answered twice"
    await instance.kill()


async def test_files_that_can_not_be_entered_are_tried_again_and_then_the_batch_fails(
    west: httpx.AsyncClient, narrow: Gateway
) -> None:
    files = narrow.batches.files
    enter = files.enter
    failures = 0
    most = 1

    async def failing(record: StoredFile) -> None:
        nonlocal failures
        if failures < most:
            failures += 1
            raise OSError("the disk says no")
        await enter(record)

    files.enter = failing  # type: ignore[method-assign]  # the fault of this test
    once = await over(west, await batch_of(west, request(0)))
    assert (once.status, failures, once.request_counts.completed) == ("completed", 1, 1)
    assert len(await content(west, once.output_file_id)) == 1
    failures, most = 0, 1_000
    failed = await over(west, await batch_of(west, request(0)))
    assert failures == 2 * BatchConfig().most_defects
    assert (failed.status, failed.output_file_id) == ("failed", None)
    assert failed.errors is not None
    assert "its log says why" in failed.errors.data[0].message
    # The gateway goes on with the next one.
    most = 0
    assert (await over(west, await batch_of(west, request(0)))).status == "completed"


async def test_a_batch_that_is_cancelled_as_it_ends_has_all_its_answers(
    west: httpx.AsyncClient, narrow: Gateway
) -> None:
    files = narrow.batches.files
    enter = files.enter
    reached, go = asyncio.Event(), asyncio.Event()

    async def slow(record: StoredFile) -> None:
        reached.set()
        await go.wait()
        await enter(record)

    files.enter = slow  # type: ignore[method-assign]  # its end takes as long as this test needs
    batch = await batch_of(west, request(0), request(1))
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    assert await status_of(west, batch) == "finalizing"
    cancelled = await west.post(f"/v1/batches/{batch}/cancel", headers=RUTH)
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelling")
    go.set()
    view = await over(west, batch)
    assert (view.status, view.request_counts.completed) == ("cancelled", 2)
    assert len(await content(west, view.output_file_id)) == 2


async def test_a_key_comes_with_one_request(west: httpx.AsyncClient, narrow: Gateway) -> None:
    keyed = RUTH | {"Idempotency-Key": "k1"}
    data = lines_of([request(0)])
    file = await upload(west, data, keyed)
    assert await upload(west, data, keyed) == file
    form: dict[str, Any] = {"files": {"file": ("in.jsonl", data * 2)}, "data": {"purpose": "batch"}}
    other = await west.post("/v1/files", headers=keyed, **form)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert (await west.get(f"/v1/files/{file}/content", headers=RUTH)).content == data
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    first = await west.post("/v1/batches", json=body, headers=keyed)
    again = await west.post("/v1/batches", json=dict(reversed(body.items())), headers=keyed)
    assert (first.status_code, again.json()["id"]) == (200, first.json()["id"])
    reused = await west.post("/v1/batches", json=body | {"model": "letters"}, headers=keyed)
    assert (reused.status_code, reused.json()["error"]["type"]) == (422, "invalid_request_error")
    assert reused.json()["error"]["code"] == "idempotency_key_reused"


async def test_a_data_set_that_is_too_large_is_not_looked_through(
    west: httpx.AsyncClient, narrow: Gateway, tmp_path: Path
) -> None:
    narrow.batches._most_bytes = 1_000
    stored = await west.put("/v1/datasets/questions", content=b"\n" * 1_001, headers=RUTH)
    assert stored.status_code == 201
    refused = await create(west, "bus://datasets/questions")
    assert (refused.status_code, "more than 1000 bytes" in refused.text) == (400, True)


async def test_a_batch_that_lost_its_gateway_does_not_wait_behind_new_ones(
    served: Served, gateway: Gateway, west: httpx.AsyncClient, narrow: Gateway
) -> None:
    """The one place is taken; two own batches are older; the one whose gateway is gone is next."""
    gateway._batch_runner._config = BatchConfig(most=0)  # this gateway has no place for it
    go, reached = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def gate(number: int) -> None:
        reached.set()
        await go.wait()

    served.gate(gate)
    batches = [await batch_of(west, request(0)) for _ in range(3)]
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    lost = await batch_of(west, request(1))
    bucket = served.bus.bucket(subjects.BATCH)
    entry = await bucket.get(batch=lost)
    assert entry is not None
    gone = entry.message.model_copy(update={"gateway": "gateway-gone", "incarnation": "i0"})
    await bucket.update(gone, revision=entry.revision, batch=lost)
    commit = narrow._batch_runner._log.commit

    async def noted(unit: Any) -> Any:
        order.append(unit.batch)
        return await commit(unit)

    narrow._batch_runner._log.commit = noted  # type: ignore[method-assign]
    go.set()
    for batch in (*batches, lost):
        assert (await over(west, batch)).status == "completed"
    assert order == [batches[0], lost, *batches[1:]]
