"""Datasets, weights and checkpoints through the bus's own object store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bus.files.artifacts import open_artifacts
from schemas.errors import BadData, DamagedCheckpoint
from schemas.job import JobSpec
from schemas.job_file.initial_weights import InitialWeights
from schemas.job_file.model import ModelSpec
from schemas.job_file.recipe import OptimizerSpec
from tests.builders.samples import data_job
from tests.checkpoint_files import publish
from tests.conftest import Connect
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer, state_tensors
from workers.data.opening import open_source
from workers.graph.stage_module import slice_stage
from workers.state.checkpoint import restore_checkpoint
from workers.state.initial_weights import load_initial
from workers.state.weights import export
from workers.tasks import analysis, sample

SPEC = ModelSpec(
    factory="workers.models.gpt:byte_gpt", args={"layers": 2, "width": 16, "heads": 2, "context": 8}
)


async def test_a_dataset_uploaded_to_the_bus(connect: Connect) -> None:
    bus = await connect("uploader")
    await open_artifacts("bus://datasets", bus).put_bytes("corpus", bytes(range(100)))
    data = {"source": "bus://datasets/corpus", "sample_tokens": 8, "validation_fraction": 0.1}
    source = await open_source(data_job(data), bus)
    inputs = torch.stack([source.batch("train", step, 0)["inputs"] for step in range(50)])
    assert 0 <= inputs.min() < 4
    assert 86 < inputs.max() < 90
    assert source.batch("validation", 0, 0)["targets"].min() > 90
    source.close()
    with pytest.raises(BadData, match="bus://datasets/absent is not on the bus"):
        await open_source(data_job(data | {"source": "bus://datasets/absent"}), bus)


async def test_weights_and_checkpoints_on_the_bus(connect: Connect) -> None:
    bus = await connect("instance")
    stage, other = (slice_stage(build(SPEC, seed), 0, 4) for seed in (0, 1))
    optimizer, other_optimizer = (StageOptimizer(each, OptimizerSpec()) for each in (stage, other))
    weights = open_artifacts("bus://artifacts/job/weights", bus)
    await export(stage, weights, "model-00001-of-00001.safetensors")
    await load_initial(other, weights, InitialWeights(url=weights.url))
    assert all(torch.equal(one, two) for one, two in zip(stage.parameters(), other.parameters(), strict=True))
    optimizer.step([torch.ones_like(weight) for weight in stage.parameters()], 1e-3)
    checkpoint = open_artifacts("bus://artifacts/job/checkpoints/1", bus)
    await publish(checkpoint, [(stage, optimizer)], version=1)
    assert await restore_checkpoint(other, other_optimizer, checkpoint) == 1
    pairs = zip(state_tensors(stage, optimizer), state_tensors(other, other_optimizer), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


async def test_a_checkpoint_of_which_the_bus_has_lost_a_piece_is_damaged(connect: Connect) -> None:
    bus = await connect("instance")
    stage = slice_stage(build(SPEC, 0), 0, 4)
    optimizer = StageOptimizer(stage, OptimizerSpec())
    checkpoint = open_artifacts("bus://artifacts/damaged/checkpoints/1", bus)
    await publish(checkpoint, [(stage, optimizer)], version=1)
    name = "damaged/checkpoints/1/stage-00000/__0_0.distcp"
    info = await bus.objects._info(f"artifacts/{name}")
    assert info is not None
    await bus.objects._purge(info.nuid)  # its chunks, not its entry
    with pytest.raises(DamagedCheckpoint, match=r"stage-00000/__0_0\.distcp is damaged"):
        await restore_checkpoint(stage, optimizer, checkpoint)
    await checkpoint.delete("stage-00000/__0_0")
    with pytest.raises(DamagedCheckpoint, match=r"stage-00000/__0_0\.distcp is missing"):
        await restore_checkpoint(stage, optimizer, checkpoint)


async def test_the_short_lived_workers_connect_by_themselves(
    connect: Connect, nats_url: str, tmp_path: Path
) -> None:
    bus = await connect("uploader")
    await open_artifacts("bus://datasets", bus).put_bytes("small", b"def f(): pass\n" * 20)
    stage = slice_stage(build(SPEC, 0), 0, 4)
    await export(stage, open_artifacts("bus://artifacts/short/weights", bus), "model.safetensors")
    spec = JobSpec.model_validate(
        {
            "name": "short",
            "model": SPEC.model_dump(),
            "data": {"source": "bus://datasets/small", "sample_tokens": 8},
            "training": {"steps": 1},
            "sample": {"tokens": 5},
        }
    )
    payload = {
        "job": "short",
        "sid": "short-worker",
        "spec": spec.model_dump(mode="json"),
        "cluster": "a",
        "node": "n",
        "device": "cpu",
        "servers": [nats_url],
        "token": None,
        "weights_url": "bus://artifacts/short/weights",
    }
    topology = (await asked(analysis.main, payload, tmp_path))["topology"]
    assert topology["data_tokens"] == 280
    written = await asked(sample.main, payload, tmp_path)
    assert written["text"].startswith("def ")
    absent = payload | {"spec": payload["spec"] | {"data": {"source": "bus://datasets/absent"}}}
    assert (await asked(analysis.main, absent, tmp_path))["failed"]["code"] == "bad_data"


async def asked(
    main: Callable[[dict[str, Any], Path], int], payload: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Runs a short-lived worker's entry point, which has an event loop of its own, on a thread."""
    result = folder / "result.json"
    assert await asyncio.to_thread(main, payload, result) == 0
    found: dict[str, Any] = json.loads(result.read_text())
    return found
