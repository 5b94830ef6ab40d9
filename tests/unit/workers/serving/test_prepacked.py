"""Weights that are laid out for products: which ones, with which bits, and what becomes of all other uses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from schemas.job_file.model import ModelSpec
from tests.builders.served_models import compute_threads, served_graph
from workers.compute.model import graph_of
from workers.graph.model_graph import ModelGraph
from workers.precision.int8_linear import Int8Linear
from workers.serving.exact_arithmetic import Arithmetic, arithmetic_fingerprint
from workers.serving.one_shot import OneShotModel
from workers.serving.prepacked import PrepackedWeight, prepack, unpack
from workers.serving.stage_model import StageModel

SPEC = ModelSpec(factory="user:model", args={})
TOKENS = torch.arange(12)


def parameter(outs: int, ins: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(outs + ins)
    return nn.Parameter(torch.randn(outs, ins, generator=generator), requires_grad=False)


@pytest.fixture(autouse=True)
def _where_weights_can_be_laid_out() -> None:
    if not prepack([parameter(64, 64)]):
        pytest.skip("torch has no oneDNN here: weights stay as they are")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("ins", "outs"), [(64, 96), (1536, 512), (512, 1000), (300, 510)])
def test_a_rows_product_has_the_same_bits_in_all_counts_of_rows(
    threads: int, has_bias: bool, ins: int, outs: int
) -> None:
    arithmetic = Arithmetic(threads=threads)
    rows = torch.randn(256, ins)
    bias = torch.randn(outs) if has_bias else None
    weight = parameter(outs, ins)
    before = functional.linear(rows, weight, bias)
    with compute_threads(threads), torch.inference_mode():
        assert prepack([weight]) == [weight]
        whole = functional.linear(rows, weight, bias)
        assert torch.allclose(whole, before, atol=1e-3)
        for count in arithmetic.row_counts(256):
            assert torch.equal(functional.linear(rows[:count], weight, bias), whole[:count]), count
            shifted = rows[256 - count :].clone()
            assert torch.equal(functional.linear(shifted, weight, bias), whole[256 - count :]), count


def test_a_weight_keeps_its_identity_and_its_numbers() -> None:
    weight = parameter(96, 80)
    original, identity = weight.detach().clone(), id(weight)
    assert prepack([weight]) == [weight]
    assert isinstance(weight, PrepackedWeight)
    assert isinstance(weight, nn.Parameter)
    assert id(weight) == identity
    assert (weight.shape, weight.dtype, weight.nbytes) == ((96, 80), torch.float32, 4 * 96 * 80)
    assert weight.is_mkldnn  # its own memory is gone
    assert prepack([weight]) == []
    rows = torch.randn(5, 80)
    assert torch.equal(rows @ weight.t(), rows @ original.t())
    assert torch.equal(weight[3], original[3])
    assert torch.equal(functional.embedding(torch.tensor([7]), weight)[0], original[7])
    assert torch.equal(
        functional.linear(original[:2].double(), weight.double()),
        original[:2].double() @ original.double().t(),
    )
    unpack([weight])
    assert type(weight) is nn.Parameter
    assert id(weight) == identity
    assert torch.equal(weight, original)


@pytest.mark.parametrize("shape", [(0, 80), (1, 0, 80), (1, 80), (80,), (2, 3, 80)])
def test_products_of_no_row_of_one_and_of_several_samples(shape: tuple[int, ...]) -> None:
    weight, bias, rows = parameter(96, 80), torch.randn(96), torch.randn(shape)
    expected = functional.linear(rows, weight, bias)
    assert prepack([weight]) == [weight]
    found = functional.linear(rows, weight, bias)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_weight_is_laid_out_only_where_that_is_possible_and_pays() -> None:
    whole = torch.randn(200, 64)
    unfit = [
        nn.Parameter(torch.randn(96, 64, dtype=torch.bfloat16), requires_grad=False),
        nn.Parameter(torch.randn(96, 64, dtype=torch.float64), requires_grad=False),
        nn.Parameter(torch.randn(96, 64, device="meta"), requires_grad=False),
        nn.Parameter(torch.ones(96, 64, dtype=torch.int8), requires_grad=False),
        nn.Parameter(torch.randn(64, 64, 3), requires_grad=False),
        parameter(8, 64),
        nn.Parameter(whole[:96], requires_grad=False),  # a part of another one
    ]
    assert prepack(unfit) == []
    assert all(type(weight) is nn.Parameter for weight in unfit)


def test_a_kernel_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, wrong = parameter(96, 64), 0

    def product(self: PrepackedWeight, rows: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal wrong
        wrong += 1
        return torch.zeros(*rows.shape[:-1], self.shape[0])

    monkeypatch.setattr(PrepackedWeight, "product", product)
    assert prepack([weight]) == []
    assert wrong == 1
    assert type(weight) is nn.Parameter


class MixedProducts(nn.Module):
    """(samples, tokens, 64): products of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.with_bias = nn.Linear(64, 128, bias=False), nn.Linear(128, 64)
        self.by_hand, self.both = nn.Linear(64, 64), nn.Linear(64, 64)
        self.conv = nn.Parameter(torch.randn(64, 64) / 8)  # as GPT-2 has them: (in, out)
        self.low, self.high = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        self.cut = nn.Linear(64, 192)
        self.quantized = Int8Linear(nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.with_bias(functional.silu(self.plain(x)))
        x = x + x @ self.by_hand.weight.T + self.both(x) @ self.both.weight
        x = x + torch.addmm(x.new_zeros(64), x.flatten(0, 1), self.conv).view_as(x)
        x = x + self.high(self.low(x)) + functional.linear(x, self.cut.weight[:64])
        found: Tensor = x + self.quantized(x)
        return found


def mixed_graph(*, is_tied: bool) -> ModelGraph:
    torch.manual_seed(0)
    head = nn.Linear(64, 80, bias=False)
    embedding = nn.Embedding(80, 64)
    if is_tied:
        head.weight = embedding.weight
    return graph_of(SPEC, nn.Sequential(embedding, MixedProducts(), head).requires_grad_(False))


def stage_of(graph: ModelGraph, first: int, last: int) -> StageModel:
    return StageModel(graph, first, last, arithmetic=Arithmetic(), layout=None, kv_budget_bytes=0)


def answered(graph: ModelGraph) -> Tensor:
    model = OneShotModel(graph, 0, len(graph))
    (found,) = model.answers((TOKENS[None],), 1)
    return next(iter(found.values()))


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_that_are_used_otherwise_stay_as_they_are(is_tied: bool) -> None:
    graph = mixed_graph(is_tied=is_tied)
    expected = answered(graph)
    model = stage_of(graph, 0, 3)
    model.prepack((TOKENS,))
    names = {graph.names[id(weight)] for weight in model.prepacked}
    assert names == {"1.plain.weight", "1.with_bias.weight"} | (set() if is_tied else {"2.weight"})
    assert torch.allclose(answered(graph), expected, rtol=1e-3, atol=1e-3)
    model.unpack()
    assert model.prepacked == ()
    assert torch.equal(answered(graph), expected)


def test_a_tied_head_stays_as_it_is_where_its_embedding_is_on_another_stage() -> None:
    """Otherwise logits would have other bits where the model is cut."""
    model = stage_of(graph := mixed_graph(is_tied=True), 1, 3)
    model.prepack((torch.randn(12, 64),))
    assert {graph.names[id(weight)] for weight in model.prepacked} == {"1.plain.weight", "1.with_bias.weight"}


def test_vectors_of_texts_are_made_with_the_same_weights() -> None:
    graph = served_graph("byte_gpt")
    model = OneShotModel(graph, 0, len(graph), of_logits=True)
    (expected,) = model.embedded((TOKENS[None],), 1)
    stage = stage_of(graph, 0, len(graph))
    stage.prepack((TOKENS,))
    assert stage.prepacked
    (found,) = model.embedded((TOKENS[None],), 1)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in found)


def test_a_fingerprint_says_whether_weights_are_laid_out() -> None:
    with compute_threads(1):
        prints = [arithmetic_fingerprint(Arithmetic(), prepacked) for prepacked in (0, 1, 2, 2)]
    assert "2 weights laid out" in prints[2]
    assert len(set(prints)) == 3
    digests = [text.rpartition(" ")[2] for text in prints]
    assert digests[0] != digests[1] == digests[2]


def test_a_weight_is_still_laid_out_in_a_fork() -> None:
    code = (
        "import os, torch, torch.nn.functional as functional\n"
        "from torch import nn\n"
        "from workers.serving.prepacked import prepack\n"
        "torch.set_num_threads(1)\n"
        "weight = nn.Parameter(torch.randn(128, 64), requires_grad=False)\n"
        "assert prepack([weight])\n"
        "rows = torch.randn(8, 64)\n"
        "expected = functional.linear(rows, weight)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if torch.equal(functional.linear(rows, weight), expected) else 3)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
