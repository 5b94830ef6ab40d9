"""Frozen linear weights as int8: equal however they come about, small in memory, plain in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bus.files.artifacts import open_artifacts
from schemas.errors import BadModel
from schemas.job_file.initial_weights import InitialWeights
from schemas.job_file.model import ModelSpec
from schemas.job_file.recipe import OptimizerSpec
from tests.builders.jobs import gpt, spec
from tests.checkpoint_files import publish
from workers.compute.batch_schema import batch_schema
from workers.compute.deferred_model import build_layers
from workers.compute.model import TOKENS, build
from workers.compute.optimizer import StageOptimizer
from workers.data.batches import Batch
from workers.graph.stage_module import StageModule, slice_stage
from workers.precision.int8_linear import Int8Linear
from workers.state.checkpoint import restore_checkpoint
from workers.state.initial_weights import load_initial
from workers.state.weights import export, weight_tensors
from workers.tasks.local_steps import LocalSteps

MODEL = gpt() | {"freeze": ["block_*"], "quantize": "int8"}


def model(**more: Any) -> ModelSpec:
    return ModelSpec.model_validate(MODEL | more)


def tokens(step: int, microbatch: int) -> Batch:
    drawn = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step * 10 + microbatch))
    return {"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}


def state(stage: StageModule) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in stage.state_dict().items()}


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_it_computes_as_the_weights_that_it_stands_for(dtype: str | None) -> None:
    """Forward and backward, and bits that no cut changes."""
    torch.manual_seed(0)
    plain = nn.Linear(16, 8, dtype=getattr(torch, dtype or "float32")).requires_grad_(False)
    layer = Int8Linear(plain)
    largest = plain.weight.float().abs().amax(dim=1, keepdim=True)
    assert bool(((layer.weight.float() - plain.weight.float()).abs() <= largest / 127).all())
    plain.weight.copy_(layer.weight)
    given = torch.randn(3, 16, dtype=plain.weight.dtype)
    ours, theirs = (given.clone().requires_grad_() for _ in range(2))
    out, expected = layer(ours), plain(theirs)
    assert torch.allclose(out, expected, atol=1e-2 if dtype else 1e-6)
    for end in (out, expected):
        end.square().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-1 if dtype else 1e-5)

    job = spec(model=MODEL | {"dtype": dtype}, training={"steps": 3, "microbatches": 2})
    travels = batch_schema(tokens(0, 0), ["inputs", "targets"])
    whole, apart = (LocalSteps(job, cut, travels) for cut in ([(0, 4)], [(0, 2), (2, 4)]))
    for number in range(3):
        assert whole.step(number, tokens) == apart.step(number, tokens)
    assert whole.weights_sha256() == apart.weights_sha256()


def test_a_stage_built_alone_has_the_bits_of_the_whole_build() -> None:
    whole = build(model(), 5)
    for first in range(4):
        alone = slice_stage(
            build_layers(model(), 5, TOKENS, first, first + 1, whole_bytes=0), first, first + 1
        )
        assert alike(state(alone), state(slice_stage(whole, first, first + 1)))


async def test_files_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have plain weights; read in pieces they are quantised as at once, and fill what was not built."""
    monkeypatch.setattr("workers.state.initial_weights.CHUNK_BYTES", 200)  # three rows of 16 floats
    plain = build(ModelSpec.model_validate(gpt()), 7)
    save_file(dict(weight_tensors(slice_stage(plain, 0, 4))), tmp_path / "model.safetensors")
    at_once = slice_stage(build(model(), 7), 0, 4)
    graph = build_layers(model(), 1, TOKENS, 0, 4, given=lambda name: True, whole_bytes=0)
    filled = slice_stage(graph, 0, 4)
    source = InitialWeights(url=str(tmp_path))
    assert (await load_initial(filled, open_artifacts(source.url, None), source)).missing == ()
    assert alike(state(filled), state(at_once))

    _, lines = await export(filled, open_artifacts(str(tmp_path / "out"), None), "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(lines) == set(written) == set(weight_tensors(slice_stage(plain, 0, 4)))
    layer = filled.get_submodule("block_0.mlp_up")
    assert isinstance(layer, Int8Linear)
    assert torch.equal(written["block_0.mlp_up.weight"], layer.weight)


async def test_checkpoints_keep_them_as_they_are(tmp_path: Path) -> None:
    graph = build(model(), 5)
    parts = [
        (part := slice_stage(graph, *cut), StageOptimizer(part, OptimizerSpec())) for cut in ((0, 2), (2, 4))
    ]
    await publish(artifacts := open_artifacts(str(tmp_path), None), parts, version=3)
    whole = slice_stage(build(model(), 6), 0, 4)
    assert await restore_checkpoint(whole, StageOptimizer(whole, OptimizerSpec()), artifacts) == 3
    assert alike(state(whole), state(slice_stage(graph, 0, 4)))
    assert whole.get_parameter("block_0.mlp_up.weight_int8").dtype is torch.int8


@pytest.mark.parametrize("frozen", [[], ["embed*"]])
def test_a_model_without_frozen_linear_weights_is_refused(frozen: list[str]) -> None:
    with pytest.raises(BadModel, match=r"^model\.quantize: int8 is for frozen weights .* model\.freeze"):
        build(model(freeze=frozen), 0)


def test_trained_layers_stay_as_they_are() -> None:
    """Of low-rank adapters only the base is quantised."""
    graph = build(model(freeze=["block_0*"]), 0)
    types = {type(module) for name, module in graph.model.named_modules() if name.startswith("block_1")}
    assert Int8Linear not in types
    assert any(isinstance(module, Int8Linear) for module in graph.model.modules())
