"""Exact sums: the same bits in any order and grouping, and no residue of what was refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from schemas.errors import GradientRefused
from workers.compute.gradient_sum import FRACTION_BITS, GradientSum

SHAPES = [(70, 1000), (13,), (0,), (3, 5, 7)]
COUNT = 4


def parameters() -> list[Tensor]:
    return [torch.zeros(shape) for shape in SHAPES]


def gradients(microbatch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return [torch.randn(shape, generator=generator) * 10.0 ** (-microbatch) for shape in SHAPES]


def summed(order: list[int], exact: bool = True) -> Tensor:
    total = GradientSum(parameters(), exact=exact, microbatches=COUNT)
    for microbatch in order:
        total.add(microbatch, gradients(microbatch))
    return total.copy_for_reduce()


def test_exact_sums_do_not_depend_on_order_nor_on_who_adds() -> None:
    expected = summed([0, 1, 2, 3])
    for order in itertools.permutations(range(COUNT)):
        assert torch.equal(summed(list(order)), expected)
    # two replicas, added up by an all-reduce in whatever order
    assert torch.equal(summed([3, 1]) + summed([0, 2]), expected)


def test_float_sums_do_depend_on_order() -> None:
    """Why the exact mode exists; without it, this test says nothing."""
    orders = [summed(list(order), exact=False) for order in itertools.permutations(range(COUNT))]
    assert any(not torch.equal(orders[0], other) for other in orders)


@pytest.mark.parametrize("exact", [True, False])
def test_the_mean_is_the_mean(exact: bool) -> None:
    total = GradientSum(parameters(), exact=exact, microbatches=COUNT)
    for microbatch in range(COUNT):
        total.add(microbatch, gradients(microbatch))
    for index, mean in enumerate(total.to_gradients(total.copy_for_reduce())):
        expected = sum(gradients(microbatch)[index].double() for microbatch in range(COUNT)) / COUNT
        assert mean.dtype == torch.float32
        assert mean.shape == SHAPES[index]
        torch.testing.assert_close(mean.double(), expected, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**16 * 1.01])
def test_what_cannot_be_summed_is_refused_without_residue(value: float) -> None:
    total = GradientSum(parameters(), exact=True, microbatches=COUNT)
    total.add(0, gradients(0))
    before = total.copy_for_reduce()
    bad = gradients(1)
    bad[-1][2, 4, 6] = value  # the very last element: all others have been quantised by then
    with pytest.raises(GradientRefused, match="microbatch 1: the gradient of parameter 3"):
        total.add(1, bad)
    assert torch.equal(total.copy_for_reduce(), before)
    assert total.microbatches == {0}
    total.add(1, gradients(1))
    assert torch.equal(total.copy_for_reduce(), summed([0, 1]))


def test_what_is_summed_is_the_product_rounded_half_to_even() -> None:
    """Every size of number, on both sides of where the sum changes its way of rounding; ties; the least."""
    step = 2.0**-FRACTION_BITS
    ties = [(number + 0.5) * step for number in range(-9, 9)]
    edges = [126.9, 127.0, 127.0001, 128.0, 255.9, 256.0, 1e4, 1e-45, 2.0**-126, step, step / 2, step / 4]
    drawn = (torch.randn(100_000, generator=torch.Generator().manual_seed(13)) * 3).tolist()
    for most in (1e-15, 1e-9, 1.0, 127.0, 1e4):  # the largest decides which way it goes
        values = [value for value in (*ties, *edges, *drawn) if abs(value) <= most] or [0.0]
        gradient = torch.tensor([most, *values, *(-value for value in values)])
        total = GradientSum([torch.zeros(gradient.shape)], exact=True, microbatches=2)
        expected = [round(value * 2**FRACTION_BITS) for value in gradient.tolist()]
        total.add(0, [gradient])
        assert total.total.tolist() == expected
        total.add(1, [gradient])
        assert total.total.tolist() == [2 * value for value in expected]


def test_the_largest_allowed_gradients_do_not_wrap() -> None:
    limit = 2.0**18 / COUNT
    total = GradientSum([torch.zeros(2)], exact=True, microbatches=COUNT)
    for microbatch in range(COUNT):
        total.add(microbatch, [torch.tensor([limit, -limit])])
    (mean,) = total.to_gradients(total.copy_for_reduce())
    assert mean.tolist() == [limit, -limit]


def test_a_microbatch_counts_once_and_clearing_forgets_it() -> None:
    total = GradientSum(parameters(), exact=True, microbatches=COUNT)
    total.add(2, gradients(2))
    with pytest.raises(GradientRefused, match="microbatch 2 is in this step's sum already"):
        total.add(2, gradients(2))
    total.clear()
    assert total.microbatches == frozenset()
    assert not total.copy_for_reduce().any()
    assert not total.total.any()
    total.add(2, gradients(2))
    assert torch.equal(total.copy_for_reduce(), summed([2]))
    assert torch.equal(total.total, summed([2]))
    total.clear()
    with pytest.raises(GradientRefused):
        total.add(3, [tensor * float("nan") for tensor in gradients(3)])
    assert not total.copy_for_reduce().any()


def test_the_copy_is_apart_from_the_sum() -> None:
    total = GradientSum(parameters(), exact=True, microbatches=COUNT)
    total.add(0, gradients(0))
    total.copy_for_reduce().add_(1)  # a broken all-reduce
    assert torch.equal(total.copy_for_reduce(), summed([0]))


def test_unused_parameters_add_zero() -> None:
    total = GradientSum(parameters(), exact=True, microbatches=COUNT)
    total.add(0, gradients(0))
    total.add(1, [None] * len(SHAPES))
    assert torch.equal(total.copy_for_reduce(), summed([0]))


@pytest.mark.parametrize("exact", [True, False])
def test_the_first_microbatch_of_a_step_leaves_nothing_of_the_step_before(exact: bool) -> None:
    """It is written over what is there, also where it has no gradient."""
    total = GradientSum(parameters(), exact=exact, microbatches=COUNT)
    total.add(3, [tensor * 7 for tensor in gradients(3)])
    total.clear()
    total.add(0, [gradients(0)[0], *[None] * (len(SHAPES) - 1)])
    fresh = GradientSum(parameters(), exact=exact, microbatches=COUNT)
    fresh.add(0, [gradients(0)[0], *[torch.zeros(shape) for shape in SHAPES[1:]]])
    assert torch.equal(total.copy_for_reduce(), fresh.copy_for_reduce())


@pytest.mark.parametrize("count", [3, 4])
def test_the_mean_has_the_bits_of_the_quotient(count: int) -> None:
    """Also where M is a power of two and it is a product."""
    total = GradientSum(parameters(), exact=True, microbatches=count)
    total.add(1, gradients(1))
    expected = total.total.double().div(2.0**FRACTION_BITS * count).float()
    found = torch.cat([part.reshape(-1) for part in total.to_gradients(total.copy_for_reduce())])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("exact", [True, False])
def test_the_checksum_sees_values_and_their_order(exact: bool) -> None:
    flat = summed([0, 1], exact)
    same = GradientSum.checksum(flat)
    assert same == GradientSum.checksum(flat.clone())
    changed = flat.clone()
    changed[69_999] += changed[69_999]
    swapped = flat.clone()
    swapped[[5, 66_000]] = swapped[[66_000, 5]]
    assert len({same, GradientSum.checksum(changed), GradientSum.checksum(swapped)}) == 3
    assert len(same) == 16


def test_the_checksum_never_changes() -> None:
    """Frozen: other digits would be another wire format between replicas of two versions."""
    words = torch.arange(70_000, dtype=torch.int64) * 0x1_0000_0001
    assert GradientSum.checksum(words) == "beb82ceed188514a"
    assert GradientSum.checksum(words.float()) == "333bc21bb4daa0f0"


def test_norms_are_per_parameter_and_independent_of_grouping() -> None:
    together = GradientSum.squared_norms(gradients(0))
    apart = [GradientSum.squared_norms([gradient])[0] for gradient in gradients(0)]
    assert list(together) == apart
    for norm, gradient in zip(together, gradients(0), strict=True):
        assert norm == pytest.approx(float(gradient.double().square().sum()), rel=1e-12)


def test_a_parameter_that_layers_share_has_room_for_each() -> None:
    most = 2.0 ** (61 - FRACTION_BITS) / (COUNT * 2)  # a float32, more than half of the limit
    large = [torch.full(shape, most) for shape in SHAPES]
    total = GradientSum(parameters(), exact=True, microbatches=COUNT, uses=3)
    for microbatch in range(COUNT):
        total.add(microbatch, large, [(0, large[0]), (0, large[0])])
    assert int(total.total[0]) == 3 * COUNT * round(most * 2**FRACTION_BITS)
    total.clear()
    with pytest.raises(GradientRefused, match="beyond"):
        total.add(0, [one * 1.5 for one in large])
