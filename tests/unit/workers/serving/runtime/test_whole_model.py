"""What a stage knows of layers whose weights are elsewhere, and models that mix kinds of layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from schemas.registry import TensorSchema
from tests.builders.served_models import CONTEXT, GPT2, LLAMA, compute_threads
from tests.unit.workers.serving.runtime.test_stage_loading import loaded, order
from workers.compute.deferred_model import build_layers
from workers.compute.model import build
from workers.serving.runtime import stage_loading
from workers.serving.runtime.stage_loading import LoadedStage
from workers.serving.stage_model import StageItem

ANY = "workers.models.transformers_model:transformers_model"


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are taken for large ones: a stage has the weights of its own layers alone."""
    monkeypatch.setattr(stage_loading, "build_layers", partial(build_layers, whole_bytes=0))
    monkeypatch.setattr(stage_loading, "WHOLE_BYTES", 0)


MIXED = """
import torch
import torch.nn.functional as functional
from torch import nn


class Attention(nn.Module):
    def __init__(self, by_hand):
        super().__init__()
        self.by_hand, self.linear = by_hand, nn.Linear(32, 96)

    def forward(self, x):
        query, key, value = self.linear(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            scores = (query @ key.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
            found = torch.softmax(scores, -1) @ value
        else:
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + found.transpose(1, 2).flatten(2)


def mixed():
    return nn.Sequential(nn.Embedding(96, 32), Attention(False), Attention(True), nn.Linear(32, 96))
"""
"""Two stages: the first one's attention can be kept, the second one's is computed by hand."""


async def stages_of(model: dict[str, Any], layers: int, **serve: Any) -> list[LoadedStage]:
    return [await loaded(order(stage, 2, model=model, layers=layers, **serve)) for stage in range(2)]


def greedy(stages: list[LoadedStage], prompt: list[int], tokens: int) -> list[int]:
    """An answer through all stages: with a cache where all have one, as it is served."""
    models = [stage.model for stage in stages]
    whole = any(stage.uncached for stage in stages)
    known, done = list(prompt), 0
    for model in models:
        assert model is not None
        if whole:
            model.without_cache()
        model.cache.reserve("s", CONTEXT)
    while len(known) < len(prompt) + tokens:
        first = 0 if whole else done
        rows: tuple[Tensor, ...] = (torch.tensor(known[first:]),)
        for model in models:
            assert model is not None
            (output,) = model.run([StageItem("s", first, rows)])
            rows = output.boundary
        assert output.logits is not None
        done = len(known)
        known.append(int(output.logits[-1].argmax()))
    return known[len(prompt) :]


@torch.inference_mode()
def plain_greedy(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    """The same by the model's own forward pass."""
    known = list(prompt)
    for _ in range(tokens):
        found = model(torch.tensor([known]))
        known.append(int(getattr(found, "logits", found)[0, -1].argmax()))
    return known[len(prompt) :]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("config", [LLAMA, {**GPT2, "tie_word_embeddings": True}], ids=["llama", "tied gpt2"])
async def test_a_large_recorded_model_of_two_stages_keeps_its_cache(config: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    model = {"factory": ANY, "args": {"config": config, "task": "causal-lm"}}
    given = order(model=model)
    whole = build(given.spec.model, given.spec.training.seed, {"inputs": torch.zeros(1, 6, dtype=torch.long)})
    with compute_threads(1):
        stages = await stages_of(model, len(whole), context=CONTEXT)
        assert [(stage.kind, stage.exact, stage.uncached) for stage in stages] == [("generate", True, "")] * 2
        prompt = list(range(2, 72))
        assert greedy(stages, prompt, 8) == plain_greedy(whole.model.eval(), prompt, 8)


async def test_a_recorded_window_is_served_as_far_as_it_is_not_reached() -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    config = LLAMA | {"model_type": "mistral", "sliding_window": 48}
    model = {"factory": ANY, "args": {"config": config, "task": "causal-lm"}}
    given = order(model=model)
    whole = build(given.spec.model, given.spec.training.seed, {"inputs": torch.zeros(1, 6, dtype=torch.long)})
    found = await loaded(order(model=model, layers=len(whole)))
    assert (found.context, found.uncached) == (47, "")
    prompt = list(range(2, 40))
    assert greedy([found], prompt, 8) == plain_greedy(whole.model.eval(), prompt, 8)
    with pytest.raises(BadModel) as raised:
        await loaded(order(model=model, layers=len(whole), context=CONTEXT))
    assert raised.value.text == (
        "serve.context is 160, but MistralForCausalLM computes something else for 160 tokens than for the 6 "
        "that it was recorded with, from layer model.embed_tokens on; with serve.context: 47 it is served"
    )


async def test_texts_of_single_passes_end_where_the_recorded_model_computes_otherwise() -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    config = LLAMA | {"model_type": "mistral", "sliding_window": 48}
    model = {"factory": ANY, "args": {"config": config, "task": "causal-lm"}}
    given = order(model=model)
    whole = build(given.spec.model, given.spec.training.seed, {"inputs": torch.zeros(1, 6, dtype=torch.long)})
    found = await loaded(order(model=model, layers=len(whole), kind="predict"))
    assert (found.kind, found.samples.tokens) == ("predict", 47)
    assert found.samples.refusal({whole.inputs[0]: torch.zeros(47)}) == ""
    too_long = f"{whole.inputs[0]}: a sample of the shape [48] is longer than the 47 that this model takes"
    assert found.samples.refusal({whole.inputs[0]: torch.zeros(48)}) == too_long


@pytest.mark.parametrize("is_large", [False, True])
async def test_one_stage_without_a_cache_leaves_the_tokens_as_they_are(
    is_large: bool, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        request.getfixturevalue("large")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"users_mixture_of_layers_{is_large}".lower()  # a module is imported once, from one folder
    (tmp_path / f"{module}.py").write_text(MIXED)
    model = {"factory": f"{module}:mixed"}
    given = order(model=model)
    whole = build(given.spec.model, given.spec.training.seed)
    with compute_threads(1):
        stages = await stages_of(model, 4, context=CONTEXT)
        assert [(stage.kind, stage.exact, bool(stage.uncached)) for stage in stages] == [
            ("generate", True, False),
            ("generate", True, True),
        ]
        prompt = list(range(2, 72))
        assert greedy(stages, prompt, 8) == plain_greedy(whole.model.eval(), prompt, 8)


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_masked_language_model_is_served_by_single_passes(
    is_large: bool, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    if is_large:
        request.getfixturevalue("large")
    config = {
        "model_type": "bert",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    model = {"factory": ANY, "args": {"config": config, "task": "masked-lm"}}
    example = TensorSchema(name="input_ids", shape=(6,), dtype="int64")
    given = order(model=model)
    graph = build(given.spec.model, 0, {"input_ids": torch.zeros(1, 6, dtype=torch.long)})
    for stage in range(2):
        own = order(stage, 2, model=model, layers=len(graph)).model_copy(update={"batch": (example,)})
        assert (await loaded(own)).kind == "predict"


async def test_without_a_cache_what_is_kept_for_the_next_stage_takes_room() -> None:
    first, last = [await loaded(order(stage, 2, cache=False, cache_mib=1)) for stage in range(2)]
    assert (first.uncached, last.uncached) == ("serve.cache is false", "serve.cache is false")
    assert first.exact
    assert last.exact
    width = 16
    assert first.rows == (1 << 20) // (64 * 4 * width) * 64
    assert last.rows > first.rows, "it keeps nothing"
