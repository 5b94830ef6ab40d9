"""How large a sample a model takes, by its factory's arguments, its own config and how it was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.job_file.model import ModelSpec
from schemas.registry import TensorSchema
from workers.compute.model import build
from workers.serving.model_context import SampleLimits, model_context, sample_limits

CAUSAL_LM = "workers.models.hugging_face:causal_lm"


@pytest.mark.parametrize(
    ("factory", "args", "tokens"),
    [
        ("workers.models.gpt:byte_gpt", {"context": 80}, 80),
        (CAUSAL_LM, {"config": {"model_type": "llama", "max_position_embeddings": 2048}}, 2048),
        (CAUSAL_LM, {"config": {"model_type": "gpt2", "n_positions": 1024}}, 1024),
        (CAUSAL_LM, {"config": {"model_type": "llama"}}, None),
    ],
)
def test_a_model_says_how_many_tokens_it_takes(
    factory: str, args: dict[str, Any], tokens: int | None
) -> None:
    assert model_context(ModelSpec(factory=factory, args=args)) == tokens


def test_a_config_may_lie_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 512}))
    assert model_context(ModelSpec(factory=CAUSAL_LM, args={"config": str(tmp_path)})) == 512


WORDS = TensorSchema(name="inputs", shape=(8,), dtype="int64")
IMAGE = TensorSchema(name="inputs", shape=(3, 32, 32), dtype="float32")


@pytest.mark.parametrize(
    ("limits", "fits", "refused", "why"),
    [
        (
            SampleLimits((WORDS,), tokens=47),
            [(8,), (47,)],
            (48,),
            "inputs: a sample of the shape [48] is longer than the 47 that this model takes",
        ),
        (
            SampleLimits((WORDS,), recorded=True),
            [(8,), (2,)],
            (9,),
            "inputs: a sample of the shape [9] goes beyond [8], for which this model was recorded",
        ),
        (
            SampleLimits((IMAGE,), recorded=True),
            [(3, 32, 32), (3, 16, 32)],
            (3, 32, 33),
            "inputs: a sample of the shape [3, 32, 33] goes beyond [3, 32, 32], for which this model was "
            "recorded",
        ),
        (
            SampleLimits((IMAGE,)),
            [(3, 32, 32), (3, 128, 128)],
            (3, 129, 128),
            "inputs: a sample of the shape [3, 129, 128] has more than 49152 elements; this model was tried "
            "with [3, 32, 32]",
        ),
        (
            SampleLimits((WORDS,)),
            [(8,), (4096,)],
            (4097,),
            "inputs: a sample of the shape [4097] has more than 4096 elements; this model was tried with [8]",
        ),
        (SampleLimits(), [(1_000_000,)], None, ""),
    ],
)
def test_a_sample_that_is_too_large_is_refused_in_one_line(
    limits: SampleLimits, fits: list[tuple[int, ...]], refused: tuple[int, ...] | None, why: str
) -> None:
    for shape in fits:
        assert limits.refusal({"inputs": torch.empty(shape, device="meta")}) == ""
    if refused is not None:
        assert limits.refusal({"inputs": torch.empty(refused, device="meta")}) == why


def test_a_convolution_takes_images_as_large_as_a_multiple_of_its_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "users_pictures.py").write_text(
        "from torch import nn\n"
        "def pictures(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    spec = ModelSpec(factory="users_pictures:pictures")
    graph = build(spec, 1, {"inputs": torch.zeros(1, 3, 32, 32)})
    targets = TensorSchema(name="targets", shape=(), dtype="int64")
    assert sample_limits(graph, spec, (IMAGE, targets), 4096) == SampleLimits((IMAGE,))
