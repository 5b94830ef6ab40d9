"""Each optimizer against plain torch on the same gradients; its state travels; no cut changes a bit."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bus.files.artifacts import open_artifacts
from schemas.errors import BadModel, Conflict
from schemas.job_file.recipe import AverageSpec, OptimizerSpec
from schemas.job_file.training import LossScaleSpec
from tests.checkpoint_files import publish
from workers.compute.optimizer import StageOptimizer, load_state_tensors, state_tensors
from workers.graph.sequence import of_sequence
from workers.graph.stage_module import StageModule, slice_stage
from workers.recipe.lion import Lion
from workers.state.checkpoint import copy_tensors, restore_checkpoint

STEPS = 24
SCHEDULED = [1e-2 * (1 - step / 40) for step in range(STEPS)]


def stage(first: int = 0, last: int = 3, dtype: torch.dtype = torch.float32) -> StageModule:
    torch.manual_seed(5)
    blocks = {f"block_{number}": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for number in range(3)}
    model = nn.Sequential(OrderedDict(blocks)).to(dtype)
    return slice_stage(of_sequence(model, blocks.items()), first, last)


def gradient_of(name: str, weight: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
    return torch.randn(weight.shape, generator=generator)


def gradients(module: StageModule, step: int) -> list[Tensor]:
    return [gradient_of(name, weight, step) for name, weight in module.trainable()]


def trained(module: StageModule, optimizer: StageOptimizer, steps: range = range(STEPS)) -> dict[str, Tensor]:
    for step in steps:
        optimizer.step(gradients(module, step), SCHEDULED[step], step)
    return {name: weight.detach().clone() for name, weight in module.trainable()}


def alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The weights of a plain loop, with a torch optimizer and `LambdaLR`."""
    module = stage()
    weights = [weight for _, weight in module.trainable()]
    optimizer = make(list(weights))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: SCHEDULED[min(step, STEPS - 1)] / 1e-2
    )
    for step in range(STEPS):
        for (name, weight), gradient in zip(module.trainable(), gradients(module, step), strict=True):
            weight.grad = gradient
            del name
        optimizer.step()
        schedule.step()
    return {name: weight.detach().clone() for name, weight in module.trainable()}


def split(**of_norms: Any) -> Callable[[list[Tensor]], list[dict[str, Any]]]:
    return lambda weights: [
        {"params": [weight for weight in weights if weight.ndim == 1], **of_norms},
        {"params": [weight for weight in weights if weight.ndim != 1]},
    ]


NO_DECAY = split(weight_decay=0.0)
CASES: dict[str, tuple[dict[str, Any], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "adamw": ({}, lambda w: torch.optim.AdamW(w, lr=1e-2, betas=(0.9, 0.95))),
    "adamw with groups": (
        {"weight_decay": 0.3, "groups": [{"dims": 1, "weight_decay": 0.0, "lr": 5e-3}]},
        lambda w: torch.optim.AdamW(
            split(weight_decay=0.0, lr=5e-3)(w), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.3
        ),
    ),
    "adam": (
        {"name": "adam", "args": {"amsgrad": True}},
        lambda w: torch.optim.Adam(w, lr=1e-2, amsgrad=True),
    ),
    "sgd": ({"name": "sgd"}, lambda w: torch.optim.SGD(w, lr=1e-2)),
    "nesterov": (
        {
            "name": "sgd",
            "args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            "groups": [{"match": "*.1.*", "weight_decay": 0.0}, {"match": "*.bias", "weight_decay": 0.0}],
        },
        lambda w: torch.optim.SGD(NO_DECAY(w), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "rmsprop": (
        {"name": "rmsprop", "args": {"momentum": 0.5, "centered": True}},
        lambda w: torch.optim.RMSprop(w, lr=1e-2, momentum=0.5, centered=True),
    ),
    "adagrad": ({"name": "adagrad"}, lambda w: torch.optim.Adagrad(w, lr=1e-2)),
    "adafactor": ({"name": "adafactor"}, lambda w: torch.optim.Adafactor(w, lr=1e-2)),
    "lion": ({"name": "lion", "weight_decay": 0.1}, lambda w: Lion(w, lr=1e-2, weight_decay=0.1)),
    "nadam": ({"factory": "torch.optim:NAdam"}, lambda w: torch.optim.NAdam(w, lr=1e-2)),
    "rprop": ({"factory": "torch.optim:Rprop"}, lambda w: torch.optim.Rprop(w, lr=1e-2)),
}


def spec_of(case: str) -> OptimizerSpec:
    return OptimizerSpec.model_validate({"lr": 1e-2, **CASES[case][0]})


@pytest.mark.parametrize("case", CASES)
def test_it_follows_plain_torch_and_no_cut_changes_a_bit(case: str) -> None:
    spec, make = spec_of(case), CASES[case][1]
    whole = stage()
    weights = trained(whole, StageOptimizer(whole, spec))
    expected = plain(make)
    assert all(torch.allclose(weights[name], expected[name], rtol=1e-6, atol=1e-6) for name in weights)
    cut: dict[str, Tensor] = {}
    for first, last in ((0, 1), (1, 3)):
        part = stage(first, last)
        cut |= trained(part, StageOptimizer(part, spec))
    assert alike(cut, weights)


def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest() -> None:
    whole = stage()
    weights = trained(
        whole, StageOptimizer(whole, OptimizerSpec(name="muon", lr=1e-2, args={"weight_decay": 0.1}))
    )

    class Both(torch.optim.Optimizer):
        def __init__(self, w: list[Tensor]) -> None:
            super().__init__(w, {"lr": 1e-2})
            matrices, rest = ([one for one in w if (one.ndim == 2) is two] for two in (True, False))
            self.parts = [
                torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1),
            ]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
            for part in self.parts:
                part.param_groups[0]["lr"] = self.param_groups[0]["lr"]
                part.step()

    expected = plain(Both)
    assert all(torch.allclose(weights[name], expected[name], rtol=1e-6, atol=1e-6) for name in weights)


def test_lion_is_the_papers_program() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    ours = Lion([weight], lr=0.1, betas=(0.5, 0.75), weight_decay=0.1)
    theta, moment = weight.detach().double().clone(), torch.zeros(2).double()
    for gradient in (torch.tensor([1.0, 2.0]), torch.tensor([-3.0, 0.5]), torch.tensor([0.25, -4.0])):
        weight.grad = gradient
        ours.step()
        update = (0.5 * moment + 0.5 * gradient.double()).sign()
        theta = theta - 0.1 * (update + 0.1 * theta)
        moment = 0.75 * moment + 0.25 * gradient.double()
    assert torch.allclose(weight.detach().double(), theta, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["adamw", "nesterov", "adafactor", "adagrad", "nadam"])
async def test_its_state_goes_on_elsewhere(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By what a newcomer is sent, and by a checkpoint of two stages that one stage reads: same bits."""
    spec, ema = spec_of(case), AverageSpec(decay=0.9, start_step=2)
    scale = LossScaleSpec(growth_interval=2) if dtype is torch.float16 else None
    one = stage(dtype=dtype)
    optimizer = StageOptimizer(one, spec, ema=ema, loss_scale=scale)
    for begun in (0, 5):
        there = stage(dtype=dtype)
        other = StageOptimizer(there, spec, ema=ema, loss_scale=scale)
        trained(there, other, range(3))  # whatever it had is gone
        trained(one, optimizer, range(begun))
        load_state_tensors(there, other, [tensor.clone() for tensor in state_tensors(one, optimizer)])
        assert alike(trained(there, other, range(begun, 9)), trained(one, optimizer, range(begun, 9)))
        assert alike(dict(other.shadows), dict(optimizer.shadows))
        one, optimizer = (again := stage(dtype=dtype)), StageOptimizer(again, spec, ema=ema, loss_scale=scale)

    parts = [
        (part := stage(*cut, dtype), StageOptimizer(part, spec, ema=ema, loss_scale=scale))
        for cut in ((0, 1), (1, 3))
    ]
    for part in parts:
        trained(*part, range(5))
    await publish(artifacts := open_artifacts(str(tmp_path), None), parts, version=5)
    whole = stage(dtype=dtype)
    restored = StageOptimizer(whole, spec, ema=ema, loss_scale=scale)
    assert await restore_checkpoint(whole, restored, artifacts) == 5
    weights = trained(whole, restored, range(5, 9))
    assert alike(weights, {k: v for part in parts for k, v in trained(*part, range(5, 9)).items()})
    assert alike(dict(restored.shadows), {k: v for _, each in parts for k, v in each.shadows.items()})
    assert set(restored.masters) == (set() if dtype is torch.float32 else set(weights))
    assert all(torch.equal(own.to(dtype), weights[name]) for name, own in restored.masters.items())
    assert not scale or [restored.loss_scale.scale, restored.loss_scale.applied] == [2.0**20, 1]


async def test_a_checkpoint_of_another_optimizer_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    one = stage()
    written = StageOptimizer(one, spec_of("nesterov"))
    trained(one, written, range(2))
    await publish(artifacts := open_artifacts(str(tmp_path), None), [(one, written)], version=2)
    for case, text in (
        ("lion", "is of optimizer sgd, but this job has lion"),
        ("adamw", "exp_avg/.* came as nothing"),
    ):
        there = stage()
        other = StageOptimizer(there, spec_of(case))
        before = {name: weight.detach().clone() for name, weight in there.trainable()}
        with pytest.raises(Conflict, match=text):
            await restore_checkpoint(there, other, artifacts)
        with pytest.raises(Conflict):
            load_state_tensors(there, other, state_tensors(one, written))
        assert alike(before, {name: weight.detach() for name, weight in there.trainable()})


async def test_adamw_takes_up_an_average_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    one = stage()
    written = StageOptimizer(one, OptimizerSpec())
    trained(one, written, range(2))
    assert not any(key.startswith("ema.") or key.endswith(".layout") for key in copy_tensors(one, written))
    await publish(artifacts := open_artifacts(str(tmp_path), None), [(one, written)], version=2)
    averaged = StageOptimizer(one, OptimizerSpec(), ema=AverageSpec(decay=0.5))
    assert await restore_checkpoint(one, averaged, artifacts) == 2
    assert averaged.shadows == {}


def test_the_average_is_torchs() -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    module = stage()
    optimizer = StageOptimizer(module, OptimizerSpec(), ema=AverageSpec(decay=0.9, start_step=3))
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(10):
        optimizer.step(gradients(module, step), 1e-2, step)
        if step >= 3:
            theirs.update_parameters(module)
    expected = dict(theirs.module.named_parameters())
    assert alike(dict(optimizer.shadows), {name: expected[name].detach() for name in optimizer.shadows})
    assert optimizer.shadows.keys() == expected.keys()
    present = {name: weight.detach().clone() for name, weight in module.trainable()}
    with optimizer.averaging():
        assert alike({name: weight.detach() for name, weight in module.trainable()}, dict(optimizer.shadows))
    assert alike({name: weight.detach() for name, weight in module.trainable()}, present)
    assert optimizer.exported.keys() == expected.keys()


@pytest.mark.parametrize("factory", [None, "rebinding:Rebinding"])
def test_a_shared_weight_is_one_in_training_and_in_its_average(
    factory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one stage each further layer has a leaf of its own: the average, and memory that an optimizer
    exchanges, must reach it as they reach another stage."""
    (tmp_path / "rebinding.py").write_text(
        "import torch\n"
        "class Rebinding(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n"
        "            for weight in group['params']:\n"
        "                weight.data = weight.data - group['lr'] * weight.grad\n"
    )
    monkeypatch.setenv("DMSC_CODE_PATH", str(tmp_path))
    spec = OptimizerSpec(lr=0.1) if factory is None else OptimizerSpec(factory=factory, lr=0.1)

    def tied(first: int, last: int) -> tuple[StageModule, StageOptimizer]:
        torch.manual_seed(5)
        layers = {"embed": nn.Embedding(8, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 8, bias=False)}
        layers["head"].weight = layers["embed"].weight
        module = slice_stage(of_sequence(nn.Sequential(OrderedDict(layers)), layers.items()), first, last)
        module.untie()
        optimizer = StageOptimizer(module, spec, ema=AverageSpec(decay=0.5))
        trained(module, optimizer, range(3))
        return module.eval(), optimizer

    for averaged in (True, False):
        found = []
        for cuts in (((0, 3),), ((0, 2), (2, 3))):
            values: tuple[Tensor, ...] = (torch.arange(8)[None],)
            for module, optimizer in (tied(*cut) for cut in cuts):
                with torch.no_grad(), optimizer.averaging() if averaged else contextlib.nullcontext():
                    values = module(*values)
            found.append(values[0])
        assert torch.equal(*found)
    sys.modules.pop("rebinding", None)


def test_an_option_that_there_is_not_is_named() -> None:
    for spec, text in (
        (OptimizerSpec(name="sgd", args={"momentun": 0.9}), "training.optimizer: sgd with args .*momentun"),
        (
            OptimizerSpec.model_validate({"name": "sgd", "groups": [{"match": "*", "betas": 1}]}),
            "sgd has no option betas",
        ),
        (
            OptimizerSpec.model_validate({"name": "muon", "groups": [{"dims": 1, "momentun": 1}]}),
            "muon has no option momentun; it has weight_decay, momentum",
        ),
        (
            OptimizerSpec.model_validate({"groups": [{"dims": 1, "momentum": 1}]}),
            "adamw has no option momentum",
        ),
    ):
        with pytest.raises(BadModel, match=text):
            StageOptimizer(stage(), spec)
