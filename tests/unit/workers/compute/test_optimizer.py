"""A stage's AdamW is torch's, to the bit, without the price of its class."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from schemas.job_file.recipe import AverageSpec, OptimizerSpec
from tests.builders.jobs import gpt_model
from tests.patience import PATIENCE_S
from workers.compute.model import build
from workers.compute.optimizer import StageOptimizer
from workers.graph.sequence import of_sequence
from workers.graph.stage_module import slice_stage

MODEL = gpt_model()
SPEC = OptimizerSpec(lr=3e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2)

IN_A_NEW_PROCESS = f"""
import sys
import torch
import workers.instance
from schemas.job_file.model import ModelSpec
from schemas.job_file.recipe import OptimizerSpec
from workers.compute.model import build
from workers.graph.stage_module import slice_stage
from workers.compute.optimizer import StageOptimizer
stage = slice_stage(build(ModelSpec.model_validate_json({MODEL.model_dump_json()!r}), 3), 0, 4)
for name in ("adamw", "adam", "sgd", "rmsprop", "adagrad", "adafactor", "lion", "muon"):
    gradients = [torch.ones_like(one) for one in stage.parameters()]
    StageOptimizer(stage, OptimizerSpec(name=name)).step(gradients, 1e-3)
print("torch._dynamo" in sys.modules)
"""


def test_it_gives_the_bits_of_torchs_own_class() -> None:
    stages = [slice_stage(build(MODEL, 3), 0, 4) for _ in range(2)]
    ours = StageOptimizer(stages[0], SPEC)
    theirs = torch.optim.AdamW(
        stages[1].parameters(), betas=SPEC.betas, eps=SPEC.eps, weight_decay=SPEC.weight_decay, fused=True
    )
    generator = torch.Generator().manual_seed(5)
    for lr in (1e-3, 3e-3, 2e-4):
        gradients = [torch.randn(weight.shape, generator=generator) for weight in stages[0].parameters()]
        for weight, gradient in zip(stages[1].parameters(), gradients, strict=True):
            weight.grad = gradient
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        ours.step(gradients, lr)
    pairs = zip(stages[0].parameters(), stages[1].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_gradient_too_few_is_refused() -> None:
    stage = slice_stage(build(MODEL, 3), 0, 4)
    with pytest.raises(ValueError, match="1 gradients for"):
        StageOptimizer(stage, SPEC).step([torch.zeros(1)], 1e-3)


def test_a_worker_does_without_the_compiler() -> None:
    """`torch._dynamo` costs as much as torch again; the fork server does not import it for its children."""
    told = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert told.stdout.strip() == "False"


def test_all_layers_that_share_a_weight_have_its_average_in_a_validation() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    stage = slice_stage(of_sequence(nn.Sequential(*layers), [("0", layers[0]), ("1", layers[1])]), 0, 2)
    stage.untie()
    optimizer = StageOptimizer(stage, SPEC, ema=AverageSpec(decay=0.9, use_in_validation=True))
    for _ in range(2):
        optimizer.step([torch.ones(4, 4)], 0.1)
    (weight, twin), given = stage.twins[0], torch.eye(4)
    assert torch.equal(weight, twin)
    with optimizer.averaging():
        shadow = optimizer.shadows["0.weight"]
        assert torch.equal(stage.eval()(given)[0], linear(linear(given, shadow), shadow))
    assert torch.equal(weight, twin)
    assert not torch.equal(weight, shadow)
