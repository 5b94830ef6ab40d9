"""What a gateway answers: files with progress, requests by their id, and repeated reads."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from dmsc import AsyncClient
from dmsc.client.gateway_requests import TransferProgress
from entities.gateway import Gateway
from entities.gateway.http.config import HttpConfig
from schemas.errors import Refused
from tests.integration.entities.conftest import bearer
from tests.integration.entities.stand_in_orchestrator import StandInOrchestrator

JOB = {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}}


@pytest.fixture
def door() -> HttpConfig:
    return HttpConfig(burst_s=60.0, standing_s=60.0)  # a loaded machine refuses nobody here


async def submit(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await http.post("/v1/jobs", json=JOB, headers=bearer("ruth", **headers))


async def test_datasets_by_the_client_with_progress(gateway: Gateway, tmp_path: Any) -> None:
    source = tmp_path / "corpus.bin"
    source.write_bytes(bytes(range(256)) * 10_000)
    told: list[TransferProgress] = []
    async with AsyncClient(gateway.url, token="olga") as client:
        stored = await client.upload_dataset("corpus.bin", source, progress=told.append)
        assert (stored.bytes, stored.source) == (2_560_000, "bus://datasets/corpus.bin")
        assert [one.done_bytes for one in told] == [1 << 20, 2 << 20, 2_560_000]
        assert told[-1].total_bytes == 2_560_000
        await client.upload_dataset("other", b"abc")
        assert [one.name for one in await client.datasets()] == ["corpus.bin", "other"]
        told.clear()
        target = await client.download_dataset("corpus.bin", tmp_path / "back", progress=told.append)
        assert target.read_bytes() == source.read_bytes()
        assert (told[-1].done_bytes, told[-1].total_bytes) == (2_560_000, 2_560_000)
        await client.delete_dataset("other")
        assert [one.name for one in await client.datasets()] == ["corpus.bin"]
    async with AsyncClient(gateway.url, token="ruth") as client:
        with pytest.raises(Refused, match=r"may not dataset\.delete"):
            await client.delete_dataset("corpus.bin")


async def test_a_request_is_found_by_its_id(http: httpx.AsyncClient, smo: StandInOrchestrator) -> None:
    answer = await submit(http, X_Request_Id="mine-1")
    assert answer.headers["x-request-id"] == answer.headers["x-correlation-id"] == "mine-1"
    assert smo.origins[-1] == ("mine-1", "")
    await submit(http, X_Request_Id="mine-1")
    assert len(smo.jobs) == 2, "the same id twice is two requests"
    odd = await submit(http, X_Request_Id='a"b c')
    assert odd.headers["x-request-id"] == smo.origins[-1][0] != 'a"b c'


async def test_equal_reads_have_equal_answers_until_the_job_changes(
    http: httpx.AsyncClient, smo: StandInOrchestrator
) -> None:
    job = (await submit(http)).json()["job"]
    for path in (f"/v1/jobs/{job}", "/v1/jobs?limit=5"):
        first = await http.get(path, headers=bearer("ruth"))
        again = await http.get(path, headers=bearer("ruth"))
        assert (again.status_code, again.content) == (200, first.content)
        assert again.headers["content-type"] == "application/json"
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert int(again.headers["ratelimit-remaining"]) < 400
        other = await http.get(path, headers=bearer("vera"))
        assert (other.status_code, other.content) == (200, first.content)
        assert (await http.get(path, headers=bearer("nobody"))).status_code == 401
        assert (await http.get(path)).status_code == 401
    cancelled = await http.post(f"/v1/jobs/{job}/cancel", headers=bearer("ruth"))
    assert cancelled.json()["state"] == "cancelled"
    assert (await http.get(f"/v1/jobs/{job}", headers=bearer("ruth"))).json() == cancelled.json()
    listed = await http.get("/v1/jobs?limit=5", headers=bearer("ruth"))
    assert listed.json()["jobs"] == [cancelled.json()]
