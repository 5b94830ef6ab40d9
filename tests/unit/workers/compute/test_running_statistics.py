"""Running averages of batch normalisation are those of a plain loop over the microbatches, in any order."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from workers.compute.gradient_sum import GradientSum
from workers.compute.running_statistics import RunningStatistics
from workers.graph.sequence import of_sequence
from workers.graph.stage_module import slice_stage

M = 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.BatchNorm2d(4))


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, 3, 6, 6, generator=generator) for _ in range(M)]


def after_steps(order: list[int]) -> dict[str, torch.Tensor]:
    model = network()
    statistics = RunningStatistics(model, M)
    summed = GradientSum(statistics.buffers, exact=True, microbatches=M)
    for step in range(3):
        for number in order:
            found: list[torch.Tensor] = []
            before = copy.deepcopy(model.state_dict())
            with statistics.apart(number, found):
                model(batches(step)[number])
            assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
            summed.add(number, found)
        statistics.apply([mean * M for mean in summed.to_gradients(summed.total)])
        summed.clear()
    return model.state_dict()


def test_they_are_those_of_a_plain_loop_and_of_any_order() -> None:
    plain = network()
    for step in range(3):
        for batch in batches(step):
            plain(batch)
    order = list(range(M))
    found = after_steps(order)
    for name, value in plain.state_dict().items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-7)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    random.Random(seed).shuffle(order)
    assert all(torch.equal(found[name], value) for name, value in after_steps(order).items())


def test_blocks_that_share_a_weight_keep_their_own() -> None:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(2)]
    blocks[1][0].weight = blocks[0][0].weight
    graph = of_sequence(nn.Sequential(*blocks), [("0", blocks[0]), ("1", blocks[1])])
    terms: list[list[torch.Tensor]] = []
    for cut in ([(0, 2)], [(0, 1), (1, 2)]):
        tensors: tuple[torch.Tensor, ...] = (batches(0)[0],)
        terms.append([])
        for first, last in cut:
            stage = slice_stage(graph, first, last).train()
            stage.untie()
            assert bool(stage.twins) == (last - first == 2)
            before = copy.deepcopy(stage.state_dict())
            with RunningStatistics(stage, M).apart(0, terms[-1]):
                tensors = stage(*tensors)
            assert all(torch.equal(before[name], now) for name, now in stage.state_dict().items())
    assert all(found.any() for found in terms[0])
    assert all(torch.equal(one, other) for one, other in zip(*terms, strict=True))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, track_running_stats=False)]
)
def test_what_keeps_none_that_can_be_summed_is_left_alone(norm: nn.Module) -> None:
    assert RunningStatistics(nn.Sequential(norm), M).buffers == []
