"""Batches: each request has one answer, in the file's order, whoever is killed (ADR-0155, ADR-0156)."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx

from bus import subjects
from bus.connection import Bus
from entities.gateway import Gateway, GatewayConfig
from entities.gateway.batches.batch_runner import BatchConfig
from schemas.envelope import EntityKind
from schemas.services.batches import UNIT_LINES, BatchUnit, OpenaiBatch
from tests.integration.dmsc.command_line import dmsc
from tests.integration.entities.conftest import Dial, Start, bearer, end
from tests.integration.entities.serving_stand_in import Served, answer_to
from tests.patience import PATIENCE_S
from tests.waiting import eventually

RUTH, ROB = bearer("ruth"), bearer("rob")


def request(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "letters", "prompt": f"p{number}", "max_tokens": 3, "temperature": 0} | more
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def lines_of(requests: list[Any]) -> bytes:
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in requests
    )


async def upload(http: httpx.AsyncClient, data: bytes, headers: dict[str, str] = RUTH) -> str:
    answer = await http.post(
        "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["bytes"] == len(data)
    return str(answer.json()["id"])


async def store(http: httpx.AsyncClient, data: bytes) -> None:
    stored = await http.put("/v1/datasets/questions", content=data, headers=RUTH)
    assert stored.status_code == 201, stored.text


async def create(http: httpx.AsyncClient, file: str, **more: Any) -> httpx.Response:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"} | more
    return await http.post("/v1/batches", json=body, headers=RUTH)


async def over(http: httpx.AsyncClient, batch: str) -> OpenaiBatch:
    async def found() -> OpenaiBatch | None:
        answer = await http.get(f"/v1/batches/{batch}", headers=RUTH)
        view = OpenaiBatch.model_validate(answer.json())
        return view if view.status in ("completed", "cancelled", "failed", "expired") else None

    view: OpenaiBatch = await eventually(found)
    return view


async def content(http: httpx.AsyncClient, file: str | None) -> list[dict[str, Any]]:
    answer = await http.get(f"/v1/files/{file}/content", headers=RUTH)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def files_of(http: httpx.AsyncClient) -> set[str]:
    return {each["id"] for each in (await http.get("/v1/files", headers=RUTH)).json()["data"]}


async def lines_in(http: httpx.AsyncClient, file: str | None) -> bytes:
    """A file of answers, but for the time at which its batch was created."""
    answer = await http.get(f"/v1/files/{file}/content", headers=RUTH)
    assert answer.status_code == 200, answer.text
    return re.sub(rb'"created": ?[0-9]+', b"", answer.content)


async def test_a_file_of_requests_is_answered_in_its_order(
    served: Served, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    count = UNIT_LINES + 6
    requests: list[Any] = [request(number) for number in range(count)]
    requests[3] = b"{no json"
    requests[5] = request(5, model="nobody")
    requests[7] = request(7, temperature=1)  # drawn, and all the same the same each time
    requests[9] = {"prompt": "alone", "max_tokens": 2, "temperature": 0}
    file = await upload(http, lines_of(requests))
    created = await create(http, file, metadata={"night": "1"}, model="letters")
    assert created.status_code == 200, created.text
    batch = created.json()["id"]
    view = await over(http, batch)
    assert (view.status, view.request_counts.model_dump()) == (
        "completed",
        {"total": count, "completed": count - 2, "failed": 2},
    )
    assert (view.metadata, view.model) == ({"night": "1"}, "letters")
    answers = await content(http, view.output_file_id)
    ids = [f"id-{number}" for number in range(count) if number not in (3, 5)]
    ids[ids.index("id-9")] = "request-10"
    assert [each["custom_id"] for each in answers] == ids
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}
    assert texts["id-0"] == answer_to("p0", 3)
    assert texts["request-10"] == answer_to("alone", 2)
    unread, unknown = await content(http, view.error_file_id)
    assert (unread["custom_id"], unread["response"], unread["error"]["code"]) == (
        "request-4",
        None,
        "invalid_json_line",
    )
    assert (unknown["custom_id"], unknown["response"]["status_code"]) == ("id-5", 404)

    # The same requests at the command line: the same bytes, but for the time at which each batch was created.
    (tmp_path / "in.jsonl").write_bytes(lines_of(requests))
    mesh = ("--gateway", str(http.base_url), "--token", "ruth")
    command = ("batch", "in.jsonl", "--service", "letters", "--out", "out.jsonl", *mesh)
    done = await asyncio.to_thread(dmsc, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"completed, {count - 2} of {count} answered, 2 failed" in done.stdout
    assert await files_of(http) == {file, view.output_file_id, view.error_file_id}, "its own are deleted"
    second = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == 2
    listed = await asyncio.to_thread(dmsc, "batch", "--json", *mesh, cwd=tmp_path)
    assert [each["status"] for each in json.loads(listed.stdout)["batches"]] == ["completed"] * 2
    again = json.loads(listed.stdout)["batches"][0]["id"]
    for each in (*answers, *second):
        each["response"]["body"].pop("created")
    assert second == answers

    # Others see nothing of it; its user may list, and delete.
    for path in (f"/v1/batches/{batch}", f"/v1/files/{file}", f"/v1/files/{view.output_file_id}/content"):
        stranger = await http.get(path, headers=ROB)
        assert (stranger.status_code, "error" in stranger.json()) == (404, True)
    assert (await http.post(f"/v1/batches/{batch}/cancel", headers=ROB)).status_code == 404
    assert (await http.get("/v1/batches", headers=ROB)).json()["data"] == []
    part = (await http.get("/v1/batches", params={"limit": 1}, headers=RUTH)).json()
    assert ([each["id"] for each in part["data"]], part["has_more"]) == ([again], True)
    behind = (await http.get("/v1/batches", params={"after": again}, headers=RUTH)).json()
    assert [each["id"] for each in behind["data"]] == [batch]
    files = (await http.get("/v1/files", headers=RUTH)).json()["data"]
    assert {each["purpose"] for each in files} == {"batch", "batch_output"}
    gone = await http.delete(f"/v1/files/{view.output_file_id}", headers=RUTH)
    assert gone.json() == {"id": view.output_file_id, "object": "file", "deleted": True}
    assert (await http.get(f"/v1/files/{view.output_file_id}", headers=RUTH)).status_code == 404
    assert not [
        info for info in await served.bus.objects.list(f"files/ruth/{batch}/") if "output" in info.name
    ]


async def test_what_is_wrong_is_told_in_openais_shape(served: Served, http: httpx.AsyncClient) -> None:
    file = await upload(http, lines_of([request(0)]))
    twice = await upload(http, lines_of([request(0), request(0)]))
    nameless = await upload(http, b'{"prompt": "a"}\n')
    empty = await upload(http, b"\n\n")
    for named, more, status, words in (
        ("file-none", {}, 404, "file-none"),
        ("bus://artifacts/x", {}, 400, "bus://datasets/NAME"),
        ("bus://datasets/none", {}, 404, "none"),
        (file, {"endpoint": "/v1/images"}, 400, "endpoint"),
        (file, {"completion_window": "1h"}, 400, "completion_window"),
        (file, {"output_expires_after": {}}, 400, "output_expires_after"),
        (twice, {}, 400, "requests 1 and 2"),
        (nameless, {}, 400, "model"),
        (empty, {}, 400, "no request"),
    ):
        wrong = await create(http, named, **more)
        assert wrong.status_code == status, wrong.text
        assert words in wrong.json()["error"]["message"]
    form = {"file": ("x", b"{}")}
    for how, status, words in (
        ({"files": form}, 400, "purpose"),
        ({"files": form, "data": {"purpose": "fine-tune"}}, 400, "fine-tune"),
        ({"data": {"purpose": "batch"}}, 400, "multipart"),
    ):
        wrong = await http.post("/v1/files", headers=RUTH, **how)  # type: ignore[arg-type]  # of httpx
        assert (wrong.status_code, words in wrong.json()["error"]["message"]) == (status, True), wrong.text
    viewer = bearer("vera")
    assert (await http.post("/v1/files", files=form, headers=viewer)).json()["error"][
        "type"
    ] == "permission_error"
    over_file = (await over(http, (await create(http, file)).json()["id"])).output_file_id
    assert over_file is not None
    assert (await create(http, over_file)).status_code == 400
    batch = (await create(http, file)).json()["id"]
    await over(http, batch)
    late = await http.post(f"/v1/batches/{batch}/cancel", headers=RUTH)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "batch_over")


async def units_of(bus: Bus, batch: str) -> list[BatchUnit]:
    entries = await bus.bucket(subjects.BATCH_UNIT).entries(batch=batch)
    return sorted((entry.message for entry in entries), key=lambda unit: unit.unit)


async def test_a_gateway_that_is_gone_leaves_its_batch_to_another(
    served: Served, http: httpx.AsyncClient, gateway: Gateway, dial: Dial, start: Start
) -> None:
    bus = await dial("gateway-west", EntityKind.GATEWAY)
    west = Gateway(
        bus, GatewayConfig(cluster="west", http_port=0, batches=BatchConfig(look_s=0.1, again_s=0.1))
    )
    running = await start(west)
    assert west.url is not None
    await eventually(lambda: west.generations.book.get("letters") and west.jobs.cache.get("serve1"))
    count = 3 * UNIT_LINES
    reached, go = asyncio.Event(), asyncio.Event()
    answered = 0

    async def gate(number: int) -> None:
        nonlocal answered
        answered += number == 0
        if answered > UNIT_LINES + 10:
            reached.set()
            await go.wait()

    served.gate(gate)
    async with httpx.AsyncClient(base_url=west.url, timeout=PATIENCE_S, trust_env=False) as other:
        requests: list[Any] = [request(number, temperature=number % 2) for number in range(count)]
        requests[UNIT_LINES + 1] = b"{no json"
        file = await upload(other, lines_of(requests))
        batch = (await create(other, file)).json()["id"]
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        deleted = await other.delete(f"/v1/files/{file}", headers=RUTH)
        assert (deleted.status_code, deleted.json()["error"]["code"]) == (409, "file_in_use")
    committed = await units_of(served.bus, batch)
    assert len(committed) < 3
    await end(running)
    served.gate(None)
    go.set()
    view = await over(http, batch)
    assert (view.status, view.request_counts.completed) == ("completed", count - 1)
    units = await units_of(served.bus, batch)
    assert [unit.unit for unit in units] == [0, 1, 2]
    assert units[: len(committed)] == committed
    assert units[-1].by == "gateway-east"
    answers = await content(http, view.output_file_id)
    numbers = [number for number in range(count) if number != UNIT_LINES + 1]
    assert [each["custom_id"] for each in answers] == [f"id-{number}" for number in numbers]
    texts = dict(
        zip(numbers, (each["response"]["body"]["choices"][0]["text"] for each in answers), strict=True)
    )
    assert all(texts[number] == answer_to(f"p{number}", 3) for number in numbers if not number % 2)
    # The same bytes as those of a batch whose gateway lives.
    undisturbed = await over(http, (await create(http, file)).json()["id"])
    for one, other_one in (
        (view.output_file_id, undisturbed.output_file_id),
        (view.error_file_id, undisturbed.error_file_id),
    ):
        assert one is not None
        assert await lines_in(http, one) == await lines_in(http, other_one)

    # Cancelled: what is decided stays, and its order too.
    reached.clear()
    go.clear()
    answered = 0
    served.gate(gate)
    batch = (await create(http, file)).json()["id"]
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    await http.post(f"/v1/batches/{batch}/cancel", headers=RUTH)
    go.set()
    view = await over(http, batch)
    assert view.status == "cancelled"
    units = await units_of(served.bus, batch)
    assert view.request_counts.completed == sum(unit.completed for unit in units) < count
    await eventually(lambda: not served.working)


async def test_the_command_keeps_files_where_it_is_told_to_and_those_that_it_did_not_make(
    served: Served, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of([request(0)]))
    mesh = ("--gateway", str(http.base_url), "--token", "ruth")
    kept = await asyncio.to_thread(
        dmsc, "batch", "in.jsonl", "--service", "letters", "--keep-files", *mesh, cwd=tmp_path
    )
    assert kept.returncode == 0, kept.stderr
    files = await files_of(http)
    assert len(files) == 2, "requests and answers"
    by_others = (await create(http, await upload(http, lines_of([request(1)])))).json()["id"]
    await over(http, by_others)
    before = await files_of(http)
    fetched = await asyncio.to_thread(dmsc, "batch", by_others, *mesh, cwd=tmp_path)
    assert (fetched.returncode, await files_of(http)) == (0, before), fetched.stderr
    # One that nobody waited for is fetched later; then its files go.
    started = await asyncio.to_thread(
        dmsc, "batch", "in.jsonl", "--service", "letters", "--detach", "--json", *mesh, cwd=tmp_path
    )
    detached = json.loads(started.stdout)["id"]
    await over(http, detached)
    assert len(await files_of(http)) == len(before) + 2
    fetched = await asyncio.to_thread(dmsc, "batch", detached, *mesh, cwd=tmp_path)
    assert (fetched.returncode, await files_of(http)) == (0, before), fetched.stderr
    assert (tmp_path / f"{detached}.out.jsonl").exists()


async def test_a_file_that_becomes_another_one_ends_its_batch(
    served: Served, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    source = "bus://datasets/questions"
    await store(http, lines_of([request(number) for number in range(4 * UNIT_LINES)]))
    reached, go = asyncio.Event(), asyncio.Event()

    async def gate(number: int) -> None:
        reached.set()
        await go.wait()

    served.gate(gate)
    batch = (await create(http, source)).json()["id"]
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    await store(http, lines_of([request(0)]))
    go.set()
    served.gate(None)
    view = await over(http, batch)
    assert view.status == "failed"
    assert view.errors is not None
    assert "has changed" in view.errors.data[0].message
    mesh = ("--gateway", str(http.base_url), "--token", "ruth")
    told = await asyncio.to_thread(dmsc, "batch", batch, *mesh, cwd=tmp_path)
    assert (told.returncode, "has changed" in told.stdout) == (1, True), told.stderr
    # What was decided is in its files, and nothing else of it is stored.
    counted = view.request_counts.completed
    answers = await content(http, view.output_file_id) if counted else []
    assert len(answers) == counted < 4 * UNIT_LINES
    stored = {info.name for info in await served.bus.objects.list(f"files/ruth/{batch}/")}
    assert stored == {unit.output for unit in await units_of(served.bus, batch)}


async def test_requests_of_people_go_before_those_of_batches(
    served: Served, http: httpx.AsyncClient, gateway: Gateway
) -> None:
    for each in served.instances.values():
        each.load = each.load.model_copy(update={"most_sessions": 8})
    go = asyncio.Event()
    most = 0

    async def gate(number: int) -> None:
        nonlocal most
        most = max(most, sum(len(each.bound) for each in served.last))
        await go.wait()

    await http.post("/v1/completions", json=request(0)["body"], headers=RUTH)  # what room there is is told
    served.gate(gate)
    file = await upload(http, lines_of([request(number) for number in range(40)]))
    batch = (await create(http, file)).json()["id"]
    await eventually(lambda: sum(len(each.bound) for each in served.last) >= 8)
    # Half of the room of 16 is taken, and stays so: somebody who asks gets an answer at once.
    assert not gateway.generations.passes.has_room("letters", "any", 0.5, 0, fresh_s=60.0)
    asked = asyncio.create_task(
        http.post("/v1/completions", json=request(0)["body"] | {"prompt": "person"}, headers=RUTH)
    )
    await eventually(lambda: sum(len(each.bound) for each in served.last) >= 9)
    assert most <= 9
    go.set()
    served.gate(None)
    assert (await asked).json()["choices"][0]["text"] == answer_to("person", 3)
    assert (await over(http, batch)).request_counts.completed == 40
