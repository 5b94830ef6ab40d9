"""Preprocessing as instances (draft §7.2(1)): samples counted under kills and scaling, and schemas."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from bus.mesh.discovery import resolve
from schemas.data_account import account_of
from schemas.job import JobSpec
from schemas.registry import Resolve
from tests.integration.mesh.conftest import Mesh, done, losses, outcome, tiny_job, until_step
from tests.integration.mesh.user_models.sums import POWERS

EPOCH, SAMPLES = 5, 8
"""Steps of an epoch of `POWERS` samples, and samples of a step."""


def job(name: str, *, steps: int = 4 * EPOCH, replicas: int = 1, **options: Any) -> JobSpec:
    sizes = {"steps": steps, "microbatches": 4, "microbatch_samples": 2, "checkpoint_every": 0, "seed": 11}
    base = tiny_job(name, training=sizes, parallel=options.get("parallel", {})).model_dump()
    pad_ms = options.get("pad_ms", 0.0)
    chain = [
        {"name": "read", "function": options.get("read", "sums:read"), "replicas": replicas},
        {
            "name": "noise",
            "function": options.get("noise", "sums:noisy"),
            "args": {"scale": 1.0, "pad_ms": pad_ms / 4},
            "replicas": replicas,
        },
    ]
    data = {"kind": "factory", "factory": "sums:numbers", "preprocess": chain, "validation_fraction": 0.0}
    model = {"factory": "sums:model", "args": {"pad_ms": pad_ms}, "loss": "sums:counting_loss"}
    return JobSpec.model_validate(base | {"model": model, "data": data})


async def resolved(mesh: Mesh, asked: Resolve) -> set[str]:
    """What the registry finds."""
    async with mesh.bus("looker") as bus:
        return {record.sid for record in (await resolve(bus, asked)).records}


def test_no_sample_is_lost_or_doubled_by_kills_and_scaling(mesh: Mesh) -> None:
    client = mesh.client
    peaceful = done(client, client.submit(job("pre-alone")).job)
    plan = job("pre-killed", replicas=2, pad_ms=25.0, parallel={"stages": 2, "replicas": 2})
    killed = client.submit(plan).job

    def kill(sid: str) -> None:
        os.kill(mesh.instance(sid).endpoint.pid, signal.SIGKILL)

    until_step(client, killed, 1)
    record = mesh.instance(f"{killed}-read-r1")
    assert (record.prefix, record.stage) == (f"train/{killed}/preprocess/read", -2)
    assert [each.name for each in record.input_schema] == ["text", "spare"]
    asked = Resolve(job=killed, tags=("preprocess:noise",), input_schema=record.output_schema)
    assert asyncio.run(resolved(mesh, asked)) == {f"{killed}-noise-r0", f"{killed}-noise-r1"}
    assert [(each.name, each.dtype) for each in record.output_schema] == [
        ("number", "int64"),
        ("spare", "list"),
    ]
    kill(f"{killed}-read-r0")
    until_step(client, killed, 4)
    kill(f"{killed}-data-r0")
    assert client.scale(killed, 3, unit="noise") == f"{killed}-noise-r2 will join"
    until_step(client, killed, 7)
    kill(f"{killed}-noise-r1")
    until_step(client, killed, 11)
    assert client.scale(killed, 1, unit="read") == f"{killed}-read-r1 will leave"
    assert client.scale(killed, 2, unit="noise") == f"{killed}-noise-r2 will leave"
    found = done(client, killed)
    assert found.recoveries >= 3
    assert found.weights is not None
    assert peaceful.weights is not None
    assert found.weights.sha256 == peaceful.weights.sha256
    seen = losses(client, killed)
    assert seen == losses(client, peaceful.job)
    epochs = [sum(seen[start : start + EPOCH]) * SAMPLES for start in range(0, len(seen), EPOCH)]
    assert epochs == pytest.approx([sum(range(POWERS))] * 4, abs=1e-3)
    account = account_of(found)
    assert account is not None
    (seen_source,) = account.sources
    assert (seen_source.name, seen_source.samples, seen_source.epochs) == ("data", 4 * POWERS, 4.0)
    assert found.graph is not None
    assert {unit.sid for unit in found.graph.units if unit.name} == {
        f"{killed}-{name}" for name in ("read-r0", "noise-r0", "noise-r1")
    }


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        ({"noise": "sums:absent"}, "has no 'absent'"),
        ({"noise": "sums:read"}, "data.preprocess[1] sums:read failed: TypeError: read() got an unexpected"),
        ({"read": "sums:picky"}, "data.preprocess[0] sums:picky failed: ValueError: no 13, please"),
        ({"noise": "sums:picky"}, "data.preprocess[1] sums:picky failed: ValueError: no 13, please"),
    ],
)
def test_a_function_that_fails_is_one_line(mesh: Mesh, functions: dict[str, str], text: str) -> None:
    """At submission, or in mid-run on a sample that it does not take."""
    record = outcome(mesh.client, job("pre-refused", **functions))
    assert record.state == "failed"
    assert text in record.reason
    assert "\n" not in record.reason
