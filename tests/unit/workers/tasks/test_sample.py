"""The trained model writes: the same text for the same seed, and one line where it can't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bus.files.artifacts import open_artifacts
from schemas.job import JobSpec
from tests.builders import jobs
from tests.builders.jobs import gpt
from workers.compute.model import build
from workers.graph.stage_module import slice_stage
from workers.state.weights import export
from workers.tasks.sample import main


def spec(temperature: float, seed: int = 0, width: int = 16) -> JobSpec:
    return jobs.spec(
        model=gpt(layers=1, width=width),
        data={"sample_tokens": 8},
        training={"steps": 1, "seed": seed},
        sample={"prompt": "def ", "tokens": 20, "temperature": temperature},
    )


def asked(folder: Path, job: JobSpec) -> dict[str, Any]:
    payload = {"job": "j", "spec": job.model_dump(mode="json"), "weights_url": str(folder / "weights")}
    assert main(payload, folder / "result.json") == 0
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


async def write_weights(folder: Path) -> None:
    layers = build(spec(1).model, 3)
    for first, last in ((0, 1), (1, 3)):
        artifacts = open_artifacts(str(folder / "weights"), None)
        await export(slice_stage(layers, first, last), artifacts, f"part-{first}.safetensors")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    import asyncio

    asyncio.run(write_weights(tmp_path))
    return tmp_path


def test_the_same_seed_writes_the_same_text(weights: Path) -> None:
    first, again, other = (asked(weights, spec(0.8, seed))["text"] for seed in (0, 0, 1))
    assert first == again != other
    assert first.startswith("def ")
    assert len(first.encode("utf-8", errors="replace")) >= 24


def test_at_temperature_zero_the_seed_does_not_matter(weights: Path) -> None:
    assert asked(weights, spec(0, 0))["text"] == asked(weights, spec(0, 1))["text"]


def test_weights_of_another_model_are_one_line(weights: Path) -> None:
    failed = asked(weights, spec(1, width=32))["failed"]
    assert failed["code"] == "bad_model"
    assert "but the model has" in failed["text"]
