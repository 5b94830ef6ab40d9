"""Jobs on shards at a store that fails: the same weights from anywhere, and nothing is fetched twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.job import JobSpec, JobState
from tests.builders.range_server import RangeServer, range_server
from tests.builders.shards import mds_files, write_all
from tests.integration.mesh.conftest import Mesh, done, outcome, running_mesh, tiny_job, until_step
from tests.waiting import eventually

SHARDS, PER_SHARD, WORDS = 5, 12, 32


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    draw = np.random.default_rng(3)
    print("seed 3")
    columns = {"inputs": f"ndarray:int64:{WORDS}", "targets": f"ndarray:int64:{WORDS}", "text": "str"}
    tokens = draw.integers(0, 256, (SHARDS, PER_SHARD, WORDS + 1))
    shards = [
        [{"inputs": row[:-1], "targets": row[1:], "text": "left out"} for row in shard] for shard in tokens
    ]
    return mds_files(columns, shards)


@pytest.fixture(scope="module")
def store(files: dict[str, bytes]) -> Iterator[RangeServer]:
    with range_server() as running:
        running.files |= files
        yield running


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, store: RangeServer) -> Iterator[Mesh]:
    state = tmp_path_factory.mktemp("mesh") / "state"
    with running_mesh(state, "--slots", "4", "--cluster", "a", "--allow-url", store.url) as running:
        yield running


def job(name: str, source: str, stages: int = 1, replicas: int = 1, **training: Any) -> JobSpec:
    return tiny_job(
        name,
        data={
            "kind": "shards",
            "source": source,
            "columns": {"inputs": "inputs", "targets": "targets"},
            "sample_tokens": 128,
            "validation_fraction": 0.2,
        },
        training={"steps": 12, **training},
        parallel={"stages": stages, "replicas": replicas},
    )


def test_weights_are_the_same_from_a_folder_and_from_a_store_that_fails(
    mesh: Mesh, store: RangeServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    write_all(mesh.state.parent / "mds", files)
    local = done(mesh.client, mesh.client.submit(job("local", str(mesh.state.parent / "mds"))).job)
    store.failures = 5
    remote = done(mesh.client, mesh.client.submit(job("remote", store.url)).job)
    assert local.weights is not None
    assert remote.weights is not None
    assert local.weights.sha256 == remote.weights.sha256
    assert store.failures == 0, "each failure was met"

    fetched = [request for request in store.data_requests() if request[0].startswith("shard")]
    assert len(set(fetched)) == len(fetched)
    store.requests.clear()
    again = done(mesh.client, mesh.client.submit(job("again", store.url, 2, 2)).job)
    assert again.weights is not None
    assert again.weights.sha256 == local.weights.sha256
    assert store.data_requests() == [], "the second job of the user finds all of it on the node"


async def test_top_shows_where_a_running_job_gets_its_data_and_whether_it_waits(
    mesh: Mesh, store: RangeServer
) -> None:
    running = mesh.client.submit(job("seen", store.url, steps=100_000)).job
    until_step(mesh.client, running, 3)

    async def read() -> dict[str, Any] | None:
        told = json.loads(await asyncio.to_thread(mesh.printed, "top", "--once", "--json"))
        rows = {row["sid"]: row for row in told["instances"] if row["job"] == running and row["read_bytes"]}
        return rows.get(f"{running}-data-r0")

    try:
        row = await eventually(read, "no sample says what was read of the store")
        assert row["stalled_s"] >= 0
        assert {*row["read_bytes"]} <= {"memory", "disk", "store"}, "there is no other node"
        text = await asyncio.to_thread(mesh.printed, "top", "--once")
        assert "waits for data" in text
        assert "from disk" in text
    finally:
        mesh.client.cancel(running)


def test_a_shard_that_changes_stops_the_job_with_one_line(
    mesh: Mesh, store: RangeServer, files: dict[str, bytes]
) -> None:
    store.files |= {f"other/{name}": content for name, content in files.items()}
    index = store.files["other/index.json"]
    store.files["other/index.json"] = index.replace(b'"samples": 12', b'"samples": 11')
    record = outcome(mesh.client, job("damaged", f"{store.url}/other"))
    assert record.state is JobState.FAILED
    assert "does not tell of the 11 samples" in record.reason
    assert "\n" not in record.reason


def test_a_store_that_may_not_be_named_is_refused_before_anything_is_read(
    mesh: Mesh, store: RangeServer
) -> None:
    with pytest.raises(Exception, match="is not below a URL that jobs may name"):
        mesh.client.submit(job("elsewhere", "http://127.0.0.1:9/mds"))
