"""A job's first steps in one process have the same bits wherever its layers are cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.builders.jobs import spec
from tests.builders.user_modules import user_module
from workers.compute.batch_schema import batch_schema
from workers.data.batches import Batch
from workers.tasks.local_steps import Cut, LocalSteps

MODEL = """
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs):
        return self.head(self.inner(self.embed(inputs)))

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1)) for _ in range(2)])
        self.head = nn.Linear(8, 16)

    def forward(self, inputs):
        x = self.embed(inputs).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.transpose(1, 2))

class Sparse(Tied):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8, sparse=self.sparse)

    sparse = True

class Dense(Sparse):
    sparse = False
"""


@pytest.fixture(autouse=True)
def users(tmp_path: Path) -> Iterator[None]:
    with user_module(tmp_path, "tried_tied", MODEL):
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As an instance computes: with more, kernels for some strides are others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch_of(step: int, microbatch: int) -> Batch:
    tokens = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(step * 10 + microbatch))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.parametrize("cut", [((0, 1), (1, 3)), ((0, 1), (1, 2), (2, 3))])
def test_parameters_that_stages_share_get_the_sum_of_all(cut: Cut) -> None:
    training = {"steps": 3, "microbatches": 2, "optimizer": {"lr": 0.1}, "schedule": {"name": "constant"}}
    tied = spec(model={"factory": "tried_tied:Tied"}, training=training)
    travels = batch_schema(batch_of(0, 0), ["inputs", "targets"])
    whole, apart = LocalSteps(tied, [(0, 3)], travels), LocalSteps(tied, cut, travels)
    for number in range(3):
        assert whole.step(number, batch_of) == apart.step(number, batch_of)
    assert whole.weights_sha256() == apart.weights_sha256()


@pytest.mark.parametrize("recompute", ["nothing", "blocks.*"])
def test_running_averages_are_a_microbatch_s_own_while_others_are_under_way(recompute: str) -> None:
    """A stage has the forward passes of several microbatches before the backward pass of the first."""
    training = {"steps": 2, "microbatches": 3, "optimizer": {"lr": 0.1}, "schedule": {"name": "constant"}}
    hashes = set()
    for more, cut in (({}, [(0, 6)]), ({"recompute": [recompute]}, [(0, 1), (1, 3), (3, 6)])):
        normed = spec(model={"factory": "tried_tied:Normed"}, training=training | more)
        steps = LocalSteps(normed, cut, batch_schema(batch_of(0, 0), ["inputs", "targets"]))
        for number in range(2):
            steps.step(number, batch_of)
        hashes.add(steps.weights_sha256())
    assert len(hashes) == 1


def test_a_sparse_gradient_counts_as_what_it_stands_for() -> None:
    found = set()
    for name in ("Sparse", "Dense"):
        job = spec(model={"factory": f"tried_tied:{name}"}, training={"steps": 1, "microbatches": 2})
        steps = LocalSteps(job, [(0, 1), (1, 3)], batch_schema(batch_of(0, 0), ["inputs", "targets"]))
        found.add((steps.step(0, batch_of), steps.weights_sha256()))
    assert len(found) == 1
