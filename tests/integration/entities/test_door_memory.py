"""What one user's requests may take of a gateway's memory, and of the places of others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from entities.gateway import Gateway
from entities.gateway.calls.json_bounds import MOST_ELEMENTS, MOST_LISTS
from entities.gateway.http.config import HttpConfig
from entities.gateway.http.rate_limit import RequestRate
from tests.integration.entities.conftest import bearer
from tests.integration.entities.serving_stand_in import Served, deploy
from tests.waiting import eventually

RUTH, ROB, VERA = bearer("ruth"), bearer("rob"), bearer("vera")
PART = 256 << 10
BURST = 200


@pytest.fixture
def door() -> HttpConfig:
    """Little memory for bodies, and a bucket of requests that hardly fills again."""
    return HttpConfig(
        body_bytes_each=9 << 20,
        charge_bytes=PART,
        downloads_each=1,
        open_requests=2,
        rate=RequestRate(per_s=0.01, burst=BURST),
    )


def predict(size: int) -> bytes:
    """A body of about so many bytes."""
    inputs = {"x": {"dtype": "uint8", "shape": [3], "data": "AAAA"}}
    return json.dumps({"model": "tensors", "inputs": inputs}).encode() + b" " * size


async def test_brackets_are_counted_before_they_are_lists(served: Served, http: httpx.AsyncClient) -> None:
    call = b'{"calls":[{"path":"/v1/predict","body":{"model":"m","inputs":{"x":['
    for bomb, words in (
        (b"[" * (MOST_LISTS + 1), "lists"),
        (b"{}," * MOST_LISTS + b"{}", "lists"),
        (b"1," * MOST_ELEMENTS + b"1", "values"),
    ):
        for path, body in (
            ("/v1/aggregate", call + bomb + b"]}}}]}"),
            ("/v1/predict", b'{"model":"m","inputs":{"x":[' + bomb + b"]}}"),
        ):
            refused = await http.post(path, content=body, headers=RUTH)
            assert refused.status_code == 422, refused.text
            assert f"more than {MOST_LISTS if words == 'lists' else MOST_ELEMENTS:,} {words}" in refused.text
    text = "x" * (1 << 20)
    calls = [{"path": "/v1/embeddings", "body": {"model": "letters", "input": [text, "y"]}}]
    (long,) = (await http.post("/v1/aggregate", json={"calls": calls}, headers=RUTH)).json()["answers"]
    assert (long["status"], long["body"]["error"]["code"]) == (400, "context_length_exceeded")
    assert "characters" in long["body"]["error"]["message"]


async def test_what_is_wrong_is_not_answered_in_full(served: Served, http: httpx.AsyncClient) -> None:
    long, value = "x" * (1 << 20), {"values": [1]}
    unknown = {f"k{number}": 1 for number in range(50_000)}
    for path, body in (
        ("/v1/predict", {"inputs": {"x": value | {"dtype": long}}}),
        ("/v1/predict", {"inputs": {"x": value | {"dtype": long, "data": "", "shape": [1]}}}),
        ("/v1/predict", {"inputs": {"x": value | {long: 1}}}),
        ("/v1/predict", {"inputs": {long: [1]}}),
        ("/v1/predict", {"inputs": {"x": [1]}, "format": long}),
        ("/v1/predict", {"inputs": {"x": [1]}, **unknown}),
        ("/v1/aggregate", {"calls": [{"path": "/v1/predict", "body": {}, long: 1}]}),
        ("/v1/aggregate", {"calls": [{"path": "/v1/predict", "body": {}, **unknown}]}),
        ("/v1/aggregate", {"calls": [3] * 50_000}),
    ):
        refused = await http.post(path, json={"model": "letters"} | body, headers=RUTH)
        assert (refused.status_code, len(refused.content) < 16_384) == (422, True), refused.text[:1_000]


async def test_bodies_of_one_user_fill_no_memory_of_others(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    await deploy(served.bus, "tensors", kind="predict")
    await eventually(lambda: gateway.generations.book.get("tensors"))
    for each in served.instances.values():
        each.held = asyncio.Event()

    def asked(headers: dict[str, str]) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(http.post("/v1/predict", content=predict(6 << 20), headers=headers))

    def under_way() -> int:
        return sum(len(each.predicts) for each in served.instances.values())

    first = asked(RUTH)
    await eventually(lambda: under_way() == 1)
    refused = await asked(RUTH)
    assert (refused.status_code, "under way" in refused.json()["detail"]) == (429, True), refused.text
    second = asked(ROB)
    await eventually(lambda: under_way() == 2)
    # Neither of them is one of the two that may be open.
    assert (await http.get("/v1/models", headers=VERA)).status_code == 200
    for each in served.instances.values():
        assert each.held is not None
        each.held.set()
    assert [(await each).status_code for each in (first, second)] == [200, 200]
    assert (await http.post("/v1/predict", content=predict(6 << 20), headers=RUTH)).status_code == 200
    # Each part of a body counts as a request.
    statuses = [
        (await http.post("/v1/predict", content=predict(8 << 20), headers=ROB)).status_code
        for _ in range(BURST * PART // (8 << 20))
    ]
    assert (statuses[0], statuses[-1]) == (200, 429)


async def test_who_reads_a_file_slowly_takes_no_place_of_others(
    served: Served, gateway: Gateway, http: httpx.AsyncClient
) -> None:
    data = b"x" * (32 << 20)
    stored = await http.put("/v1/datasets/large", content=data, headers=RUTH)
    assert stored.status_code == 201
    assert gateway.http is not None
    load = gateway.http.load
    async with http.stream("GET", "/v1/datasets/large", headers=RUTH) as slow:
        assert slow.status_code == 200
        assert load.open == 0
        beyond = await http.get("/v1/datasets/large", headers=RUTH)
        assert (beyond.status_code, "1 files at this moment" in beyond.text) == (429, True)
        other: Any = await http.get("/v1/datasets/large", headers=ROB)
        assert len(other.content) == len(data)
    await eventually(lambda: not load._downloads)
