"""What would make bits depend on the cut, the instance or the moment is refused before training, with the
reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from schemas.job_file.training import TrainingSpec
from tests.builders.user_modules import user_module
from workers.recipe.probe import try_recipe

OPTIMIZERS = '''
import itertools, random, torch

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.one(group, weight)

    def one(self, group, weight):
        weight.sub_(weight.grad, alpha=group["lr"])

class Norm(Plain):
    """The norm of all gradients."""
    @torch.no_grad()
    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        super().step()

class Dice(Plain):
    """Other numbers each time."""
    def one(self, group, weight):
        weight.sub_(weight.grad * random.random(), alpha=group["lr"])

class Rounding(Plain):
    """Random numbers of torch's generator, which is seeded for each parameter."""
    def one(self, group, weight):
        weight.sub_(weight.grad * torch.rand_like(weight), alpha=group["lr"])

class Hidden(Plain):
    """Counts where nobody sees it."""
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.count = 0

    def one(self, group, weight):
        self.count += 1
        weight.sub_(weight.grad / self.count, alpha=group["lr"])

class Counting(Plain):
    """Counts in its group, and keeps a list and numbers in its state."""
    def __init__(self, params, **options):
        super().__init__(params, count=0, **options)

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
        super().step()

    def one(self, group, weight):
        state = self.state[weight]
        state.setdefault("pair", [torch.zeros(3), (1.5, None)])
        state["steps"] = state.get("steps", 0) + 1
        weight.sub_(weight.grad / (group["count"] + state["steps"]), alpha=group["lr"])

class Odd(Plain):
    """Keeps what can't be sent."""
    def one(self, group, weight):
        self.state[weight]["file"] = object()

class Sam(Plain):
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("this needs a closure")

class Bad(Plain):
    def one(self, group, weight):
        weight.fill_(float("nan"))

def nothing(params, lr):
    return 3
'''


@pytest.fixture(scope="module", autouse=True)
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with user_module(tmp_path_factory.mktemp("users"), "tried_optimizers", OPTIMIZERS):
        yield


WEIGHTS: list[tuple[str, Tensor]] = [
    (f"block_{number}.{name}", nn.Parameter(torch.zeros(shape)))
    for number in range(2)
    for name, shape in {"weight": (300, 200), "bias": (300,), "norm.weight": (300,)}.items()
]


def tried(**training: Any) -> float:
    return try_recipe(TrainingSpec.model_validate({"steps": 3, **training}), WEIGHTS)


def own(name: str, **more: Any) -> dict[str, Any]:
    return {"factory": f"tried_optimizers:{name}", **more}


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (own("Norm"), "couples parameters: .*; take an optimizer that works parameter by parameter"),
        (own("Dice"), "gives other weights each time"),
        (own("Hidden"), "keeps something outside of its state|couples parameters"),
        (own("Odd"), "keeps a object in its state"),
        (own("Sam"), "needs a closure"),
        (own("Bad"), "infinite or NaN"),
        (own("nothing"), "returned a int; it must return a torch.optim.Optimizer"),
        (own("Missing"), "has no 'Missing'"),
        (
            {"groups": [{"match": ["*.bias", "*.gamma"], "weight_decay": 0}]},
            r"matches '\*.gamma'; there are block_0",
        ),
        (
            {"groups": [{"match": "*", "lr": 1}, {"dims": 1, "lr": 2}]},
            r"groups\[1\]: earlier groups have taken all",
        ),
        ({"groups": [{"dims": 4}]}, r"has dims \[4\]; there are \[1, 2\]"),
        (
            {"name": "sgd", "groups": [{"dims": 1, "nesterow": True}]},
            "sgd has no option nesterow; it has lr, momentum",
        ),
        ({"name": "adam", "args": {"betas": 3}}, "training.optimizer: adam with args"),
    ],
)
def test_what_does_not_work_is_refused_in_one_line(optimizer: dict[str, Any], line: str) -> None:
    with pytest.raises(BadModel, match=line) as caught:
        tried(optimizer=optimizer)
    assert "\n" not in caught.value.text
    assert caught.value.text.startswith(("training.optimizer", "tried_optimizers:"))


@pytest.mark.parametrize("name", ["Plain", "Rounding", "Counting"])
def test_what_works_parameter_by_parameter_is_taken(name: str) -> None:
    assert tried(optimizer=own(name)) >= 0


@pytest.mark.parametrize(
    ("training", "bytes_per_parameter"),
    [
        ({}, 8),
        ({"ema": {}}, 12),
        ({"optimizer": {"name": "sgd"}}, 0),
        ({"optimizer": {"name": "sgd", "args": {"momentum": 0.9}}, "ema": {}}, 8),
        ({"optimizer": {"name": "lion"}}, 4),
        ({"optimizer": {"name": "adam", "args": {"amsgrad": True}}}, 12),
        ({"optimizer": {"name": "adafactor"}}, 0),
    ],
)
def test_the_state_is_counted_for_the_memory(training: dict[str, Any], bytes_per_parameter: float) -> None:
    found = tried(**training)
    assert bytes_per_parameter <= found <= bytes_per_parameter + 0.2  # and its counts of steps


def test_every_short_name_passes() -> None:
    for name in ("adamw", "adam", "sgd", "rmsprop", "adagrad", "adafactor", "lion", "muon"):
        tried(
            optimizer={"name": name, "groups": [{"match": "*norm*", "lr": 1e-4}, {"dims": 1, "name": "sgd"}]}
        )
