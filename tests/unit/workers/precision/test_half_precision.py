"""Half precision: no cut changes a bit, updates are those of fp32 masters, an overflow costs a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from schemas.errors import BadModel, Conflict, GradientRefused
from schemas.job_file.training import LossScaleSpec
from tests.builders.jobs import gpt, spec
from tests.builders.user_modules import user_module
from workers.compute.batch_schema import batch_schema
from workers.compute.model import build, check_trained
from workers.data.batches import Batch
from workers.precision.loss_scale import LEAST, LossScale
from workers.tasks.local_steps import Cut, LocalSteps

MODEL = """
import torch
from torch import nn

class Mixed(nn.Module):
    '''Floats in, batch normalisation, a table that is no weight.'''
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("kept", torch.ones(8))
        self.register_buffer("angles", torch.ones(8), persistent=False)

    def forward(self, inputs):
        return self.last(self.norm(self.first(inputs)) * self.kept.to(inputs.dtype))

def half(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())

def steep(output, targets):
    return nn.functional.cross_entropy(output.float().flatten(0, -2), targets.flatten()) * 1e12
"""
TRAINING: dict[str, Any] = {"steps": 4, "microbatches": 2, "optimizer": {"lr": 1e-3}}


@pytest.fixture(autouse=True)
def users(tmp_path: Path) -> Iterator[None]:
    with user_module(tmp_path, "half_precision", MODEL):
        yield


def tokens(step: int, microbatch: int) -> Batch:
    drawn = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(step * 10 + microbatch))
    return {"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}


def steps_of(cut: Cut, model: dict[str, Any], **training: Any) -> LocalSteps:
    job = spec(model=model, training=TRAINING | training)
    return LocalSteps(job, cut, batch_schema(tokens(0, 0), ["inputs", "targets"]))


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "float16"}, {"loss_scale": {"init_scale": 2.0**20, "growth_interval": 2}}),
        ({}, {"precision": "fp16", "loss_scale": {"init_scale": 2.0**20, "growth_interval": 2}}),
        ({"dtype": "float16", "loss": "half_precision:half"}, {"steps": 8}),
    ],
    ids=["bf16", "fp16", "fp16 autocast", "fp16 loss"],
)
def test_no_cut_changes_a_bit(model: dict[str, Any], training: dict[str, Any]) -> None:
    whole, apart = (steps_of(cut, gpt() | model, **training) for cut in ([(0, 4)], [(0, 1), (1, 3), (3, 4)]))
    before = whole.weights_sha256()
    losses = [whole.step(number, tokens) for number in range(4)]
    assert losses == [apart.step(number, tokens) for number in range(4)]
    assert whole.weights_sha256() == apart.weights_sha256()
    assert whole.weights_sha256() != before
    scales = {stage.scaling()[0] for each in (whole, apart) for stage in each._stages}
    assert len(scales) == 1
    assert scales.isdisjoint({2.0**20, 65536.0}), "gradients overflowed"


def test_updates_are_those_of_the_masters() -> None:
    """Of a weight near 1, bf16 has steps of 2^-8: updates of 1e-4 would vanish one by one."""
    whole = steps_of([(0, 4)], gpt() | {"dtype": "bfloat16"}, optimizer={"lr": 1e-4})
    stage = whole._stages[0]
    name, weight = next((n, w) for n, w in stage.module.trainable() if n == "head.norm.weight")
    assert bool((weight == 1).all())
    for number in range(4):
        whole.step(number, tokens)
    master = stage.optimizer.masters[name]
    assert master.dtype is torch.float32
    assert bool((master != 1).all())
    assert torch.equal(master.bfloat16(), weight)


def test_a_step_that_overflows_is_left_out_and_halves_the_scale() -> None:
    whole = steps_of([(0, 4)], gpt() | {"dtype": "float16"}, loss_scale={"init_scale": 2.0**20})
    before = whole.weights_sha256()
    whole.step(0, tokens)
    assert whole._stages[0].scaling() == (2.0**19, ())
    assert whole.weights_sha256() == before
    for number in range(1, 4):
        whole.step(number, tokens)
    assert whole.weights_sha256() != before


def test_gradients_that_no_scale_helps_are_refused() -> None:
    model = gpt() | {"dtype": "float16", "loss": "half_precision:steep"}
    whole = steps_of([(0, 4)], model, loss_scale={"init_scale": LEAST})
    with pytest.raises(GradientRefused, match="not finite"):
        whole.step(0, tokens)


def test_the_scale_is_a_fold_over_the_steps() -> None:
    scale = LossScale(LossScaleSpec(init_scale=4.0, growth_interval=3))
    for applied in (True, True, False, True, True, True, True):
        scale.apply() if applied else scale.skip()
    assert (scale.scale, scale.applied) == (4.0, 1)
    other = LossScale(LossScaleSpec())
    other.load(scale.to_tensor())
    assert (other.scale, other.applied) == (4.0, 1)
    other.spec = LossScaleSpec(growth_interval=1)
    other.apply()
    assert other.scale == 8.0, "also where it has been so for longer than another job allows"
    with pytest.raises(Conflict, match="loss scale"):
        LossScale.check(torch.tensor([3.0, 0.0], dtype=torch.float64))


def test_what_keeps_its_type() -> None:
    job = spec(model={"factory": "half_precision:Mixed", "dtype": "bfloat16"})
    graph = build(job.model, 0, {"inputs": torch.zeros(2, 4), "targets": torch.zeros(2, dtype=torch.int64)})
    types = {
        name: tensor.dtype for name, tensor in [*graph.model.named_parameters(), *graph.model.named_buffers()]
    }
    halves = {name for name, dtype in types.items() if dtype is torch.bfloat16}
    assert halves == {"first.weight", "first.bias", "last.weight", "last.bias", "kept"}


def test_types_that_can_not_be_trained_are_refused() -> None:
    with pytest.raises(BadModel, match=r"parameter a is float64; .* set model.dtype"):
        check_trained([("a", nn.Parameter(torch.zeros(1, dtype=torch.float64)))], scaled=False)
    half = [("a", nn.Parameter(torch.zeros(1, dtype=torch.float16)))]
    with pytest.raises(BadModel, match=r"loss is not scaled.*model.dtype: float16, or training.loss_scale"):
        check_trained(half, scaled=False)
    check_trained(half, scaled=True)
