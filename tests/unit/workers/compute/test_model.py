"""Cutting the model changes nothing: not the loss, not one bit of a gradient, dropout included."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from schemas.errors import BadModel
from schemas.job_file.model import ModelSpec
from tests.builders.graph_parts import layers_of, loss_of
from tests.builders.jobs import gpt_model
from workers.compute.model import build
from workers.graph.model_graph import sharing_layers
from workers.graph.randomness import layer_seed
from workers.graph.stage_module import Precision, slice_stage

SPEC = gpt_model(layers=3, width=32, heads=4, context=16, dropout=0.2)
LAYERS = 5


@pytest.fixture
def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    window = torch.randint(0, 256, (4, 17), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def run_stages(
    cuts: list[int], tokens: tuple[Tensor, Tensor], precision: Precision = "fp32"
) -> tuple[float, dict[str, Tensor]]:
    """Forward and backward through the stages between `cuts`, as instances do it."""
    inputs, targets = tokens
    layers = build(SPEC, seed=7)
    stages = [
        slice_stage(layers, first, last, job_seed=7, precision=precision)
        for first, last in itertools.pairwise(cuts)
    ]
    carried: list[tuple[Tensor, ...]] = []
    outputs: list[tuple[Tensor, ...]] = []
    hidden: tuple[Tensor, ...] = (inputs,)
    for index, stage in enumerate(stages):
        if index:
            hidden = tuple(tensor.detach().requires_grad_() for tensor in hidden)
        carried.append(hidden if index else ())
        hidden = stage(*hidden, step=3, microbatch=2)
        outputs.append(hidden)
    loss = loss_of(SPEC)(hidden[0], targets)
    ends: tuple[Tensor, ...] = (loss,)
    incoming: list[Tensor] | None = None
    gradients: dict[str, Tensor] = {}
    for stage, entry, output in reversed(list(zip(stages, carried, outputs, strict=True))):
        named = stage.trainable()
        found = torch.autograd.grad(
            ends if incoming is None else output, [*(weight for _, weight in named), *entry], incoming
        )
        gradients |= {name: grad for (name, _), grad in zip(named, found, strict=False)}
        incoming = list(found[len(named) :])
    return loss.item(), gradients


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_segmentation_gives_the_same_bits(tokens: tuple[Tensor, Tensor], precision: Precision) -> None:
    loss, whole = run_stages([0, LAYERS], tokens, precision)
    for cuts in ([0, 1, 5], [0, 2, 5], [0, 4, 5], [0, 1, 3, 5], [0, 1, 2, 3, 4, 5]):
        other_loss, parts = run_stages(cuts, tokens, precision)
        assert other_loss == loss
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole), cuts


def test_recomputing_draws_the_same_dropout_and_another_microbatch_draws_another(
    tokens: tuple[Tensor, Tensor],
) -> None:
    stage = slice_stage(build(SPEC, 7), 0, 3, job_seed=7)
    (first,) = stage(tokens[0], step=1, microbatch=0)
    torch.rand(100)  # whatever else draws meanwhile
    (again,) = stage(tokens[0], step=1, microbatch=0)
    (other,) = stage(tokens[0], step=1, microbatch=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_seed_alone_decides_the_initial_weights_and_the_caller_keeps_its_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, three = (slice_stage(build(SPEC, seed), 0, LAYERS) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    weights = [dict(stage.named_parameters()) for stage in (one, two, three)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["embed.token.weight"], weights[2]["embed.token.weight"])


def test_layer_seeds_differ_in_each_of_their_parts() -> None:
    parts = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    seeds = {layer_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "users_model.py"
    path.write_text(
        """
import torch
from torch import nn

def listed():
    return nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])

class Wrapped(nn.Module):
    def __init__(self, extra=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        if extra:
            self.scale = nn.Parameter(torch.ones(1))

def tied():
    first, last = nn.Embedding(256, 8), nn.Linear(8, 256, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, nn.Linear(8, 8), last)

def empty():
    return nn.Sequential()

def failing():
    raise RuntimeError("no weights today")

def number():
    return 3

def dictionary():
    class Strange(nn.Module):
        def forward(self, x):
            return {"logits": x}
    return nn.Sequential(Strange())

def reserved():
    from collections import OrderedDict
    return nn.Sequential(OrderedDict(trainable=nn.Identity()))
"""
    )
    sys.modules.pop("users_model", None)
    yield path
    sys.modules.pop("users_model", None)


def of(name: str, **args: object) -> ModelSpec:
    return ModelSpec(factory=f"users_model:{name}", args=args)


@pytest.mark.usefixtures("user_module")
def test_lists_and_one_level_of_layers_are_taken_apart() -> None:
    assert [name for name, _ in layers_of(build(of("listed"), 0))] == ["0", "1"]
    layers = build(of("Wrapped"), 0)
    assert [name for name, _ in layers_of(layers)] == ["layers.0", "layers.1"]
    assert set(dict(slice_stage(layers, 1, 2).named_parameters())) == {"layers.1.weight", "layers.1.bias"}


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (of("failing"), "RuntimeError: no weights today (users_model.py:"),
        (of("number"), "returned a int"),
        (of("empty"), "without layers"),
        (of("listed", width=3), "unexpected keyword argument 'width'"),
        (of("Wrapped", extra=True), "parameters outside its .layers (scale)"),
    ],
)
def test_factories_that_fail_say_why_in_one_line(spec: ModelSpec, text: str) -> None:
    with pytest.raises(BadModel) as caught:
        build(spec, 0)
    assert text in caught.value.text
    assert "\n" not in caught.value.text


@pytest.mark.usefixtures("user_module")
def test_a_shared_parameter_has_one_name_and_each_layer_a_gradient_of_its_own() -> None:
    graph = build(of("tied"), 0)
    assert sharing_layers(graph) == ((0, 2),)
    assert graph.users["0.weight"] == (0, 2)
    apart = [slice_stage(graph, 0, 1), slice_stage(graph, 2, 3)]
    assert [[name for name, _ in stage.trainable()] for stage in apart] == [["0.weight"], ["0.weight"]]
    whole = slice_stage(graph, 0, 3)
    whole.untie()
    ((weight, twin),) = whole.twins
    assert weight is not twin
    assert weight.data_ptr() == twin.data_ptr()
    (logits,) = whole(torch.arange(6).reshape(2, 3), step=0, microbatch=0)
    first, second = torch.autograd.grad(logits.square().mean(), [weight, twin])
    assert first.count_nonzero() < second.count_nonzero()  # the embedding's rows, and all of the head's


@pytest.mark.usefixtures("user_module")
def test_impossible_slices_names_and_outputs_are_refused() -> None:
    with pytest.raises(BadModel, match="no slice of a model with 2 layers"):
        slice_stage(build(of("listed"), 0), 1, 3)
    with pytest.raises(BadModel, match="bears a name"):
        slice_stage(build(of("reserved"), 0), 0, 1)
    with pytest.raises(BadModel, match="layers must return tensors"):
        slice_stage(build(of("dictionary"), 0), 0, 1)(torch.ones(1))


def test_losses_may_be_functions_or_classes() -> None:
    output, targets = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0])
    for loss in ("torch.nn:MSELoss", "torch.nn.functional:mse_loss"):
        assert loss_of(SPEC.model_copy(update={"loss": loss}))(output, targets).item() == 5.0


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(BadModel, match="width 33 is not a multiple of heads 4"):
        build(SPEC.model_copy(update={"args": {"width": 33, "heads": 4}}), 0)
