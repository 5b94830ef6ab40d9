"""Which models are served with a cache, found by trying; which are not, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from schemas.errors import BadModel
from schemas.job_file.model import ModelSpec
from tests.builders.served_models import CONTEXT, compute_threads, served_graph
from workers.compute.model import build, graph_of
from workers.graph.model_graph import ModelGraph
from workers.serving.cache_check import CacheCheck, check_cache, sample_tokens
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.stage_model import MissingRows, StageItem, StageModel

SPEC = ModelSpec(factory="user:model", args={})


def check(graph: ModelGraph, context: int = 100, most_rows: int = 64) -> CacheCheck:
    with compute_threads(1):
        sample = sample_tokens(graph, context)
        return check_cache(graph, 0, len(graph), sample, arithmetic=Arithmetic(), most_rows=most_rows)


class Mixing(nn.Module):
    """(samples, tokens, 32): attention, or what is put in its place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        tokens = x.shape[1]
        if self.kind == "both ways":
            found = functional.scaled_dot_product_attention(query, key, value)
        elif self.kind == "window":
            near = torch.ones(tokens, tokens).tril().triu(-40).bool()
            found = functional.scaled_dot_product_attention(query, key, value, near)
        elif self.kind == "mask":
            before = torch.ones(tokens, tokens).tril().bool()
            found = functional.scaled_dot_product_attention(query, key, value, before)
        elif self.kind == "by hand":
            hidden = torch.ones(tokens, tokens).triu(1).bool()
            scores = (query @ key.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
            found = torch.softmax(scores, -1) @ value
        else:  # a mean of all before
            found = value.cumsum(2) / torch.arange(1, tokens + 1)[:, None]
        mixed: Tensor = x + found.transpose(1, 2).flatten(2)
        return mixed


def mixing(kind: str) -> ModelGraph:
    torch.manual_seed(0)
    return graph_of(SPEC, nn.Sequential(nn.Embedding(50, 32), Mixing(kind), nn.Linear(32, 50)))


@pytest.mark.parametrize(
    ("kind", "because"),
    [
        ("mask", ""),
        ("both ways", "attention in 1 is not causal"),
        ("window", "attention in 1 is not causal"),
        ("by hand", "layers 0 to 2 give other numbers with a cache"),
        ("running mean", "layers 0 to 2 give other numbers with a cache"),
    ],
)
def test_what_mixes_rows_decides(kind: str, because: str) -> None:
    found = check(mixing(kind))
    assert found.because.startswith(because)
    assert (found.layout is not None) == (not because)


def test_the_head_is_computed_for_wanted_rows_alone() -> None:
    layout = check(served_graph("byte_gpt")).layout
    assert layout is not None
    assert (layout.tail, [site.layer for site in layout.sites]) == (3, ["block_0", "block_1"])


def test_a_context_beyond_the_models_is_named() -> None:
    with pytest.raises(
        BadModel, match=r"layer embed fails for a session of 161 tokens: .*longer than the model"
    ):
        check(served_graph("byte_gpt"), CONTEXT + 1)


def test_a_window_shorter_than_the_context_is_seen_at_the_whole_context() -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    config: dict[str, Any] = {
        "model_type": "mistral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 50,
        "sliding_window": 48,
    }
    spec = ModelSpec(
        factory="workers.models.transformers_model:transformers_model",
        args={"config": config, "task": "causal-lm"},
    )
    tokens = torch.zeros(1, 100, dtype=torch.int64)
    found = check(build(spec, 1, {"inputs": tokens, "targets": tokens}))
    assert found.because == "attention in model.layers.0 is not causal"


def test_rows_that_are_missing_are_named_and_nothing_is_computed() -> None:
    graph = served_graph("byte_gpt")
    model = StageModel(
        graph, 0, 4, arithmetic=Arithmetic(), layout=check(graph).layout, kv_budget_bytes=1 << 20
    )
    item = StageItem("a", 5, (torch.zeros(2, dtype=torch.int64),))
    with pytest.raises(ValueError, match="session a has no reservation"):
        model.run([item])
    model.cache.reserve("a", 20)
    with pytest.raises(MissingRows, match="session a goes on at row 5, but 0 rows are cached") as missing:
        model.run([item])
    assert (missing.value.there, model.cache.used_bytes) == (0, 0)
    (output,) = model.run([StageItem("a", 0, (torch.zeros(5, dtype=torch.int64),), wanted=3)])
    assert output.logits is not None
    assert output.logits.shape == (3, 256)
    assert model.cache.tokens("a") == 5
