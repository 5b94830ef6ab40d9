"""Stages of a model that no process holds whole: the bits of the whole build, of every front end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.job_file.model import ModelSpec
from tests.builders.jobs import gpt_model
from workers.compute.deferred_model import build_layers, outline_model
from workers.compute.model import TOKENS, build
from workers.graph.stage_module import slice_stage

USER_MODELS = Path(__file__).parents[3] / "integration" / "mesh" / "user_models"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def spec(name: str) -> ModelSpec:
    if name == "sequence":
        return gpt_model(width=128, layers=3, heads=4)
    if name == "llama":
        pytest.importorskip("transformers", reason="the extra `hf` is not installed")
        return ModelSpec(factory="workers.models.hugging_face:causal_lm", args={"config": LLAMA})
    return ModelSpec(factory=f"forked:{name}", args={"width": 160})


@pytest.mark.parametrize("name", ["sequence", "Hourglass", "towers", "llama"])
def test_each_stage_has_the_bits_of_the_whole_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(USER_MODELS)
    model, state = spec(name), torch.get_rng_state()
    whole = build(model, 5)
    expected = {key: value.clone() for key, value in whole.model.state_dict().items()}
    assert outline_model(model, 5, TOKENS).because == ""
    seen: set[str] = set()
    for first in range(len(whole)):
        graph = build_layers(model, 5, TOKENS, first, first + 1, whole_bytes=0)
        assert [layer.name for layer in graph.layers] == [layer.name for layer in whole.layers]
        stage: dict[str, Any] = slice_stage(graph, first, first + 1).state_dict()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in stage.items())
        seen |= set(stage)
        large = [key for key, tensor in expected.items() if tensor.nbytes > 1 << 16]
        own = graph.model.state_dict()
        assert all(own[key].is_meta for key in large if key not in stage), "no other layer has memory"
        filled = build_layers(model, 5, TOKENS, first, first + 1, given=lambda name: True, whole_bytes=0)
        slots = slice_stage(filled, first, first + 1).state_dict()
        assert {key: tensor.shape for key, tensor in slots.items()} == {
            key: tensor.shape for key, tensor in stage.items()
        }
        assert not any(tensor.is_meta for tensor in slots.values())
    assert seen == set(expected)
    assert torch.equal(torch.get_rng_state(), state), "the caller keeps its generator"


@pytest.mark.parametrize("given", [None, lambda name: True], ids=["built", "filled"])
def test_a_tied_weight_of_the_last_stage_is_one_under_both_of_its_names(given: Any) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    args = {"config": LLAMA, "tie_weights": True}
    model = ModelSpec(factory="workers.models.hugging_face:causal_lm", args=args)
    whole = build(model, 5)
    last = len(whole) - 1
    expected = slice_stage(whole, last, last + 1)
    graph = build_layers(model, 5, TOKENS, last, last + 1, given=given, whole_bytes=0)
    found = slice_stage(graph, last, last + 1)
    assert found.by_name().keys() == expected.by_name().keys()
    assert found.aliases == expected.aliases != {}
    assert not any(weight.is_meta for weight in found.parameters())
