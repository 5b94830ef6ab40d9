"""Llama and GPT-2 configs as layers: the same logits as transformers', to the bit, however cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import BadModel
from schemas.job_file.model import ModelSpec
from workers.compute.model import build
from workers.graph.model_graph import sharing_layers
from workers.graph.stage_module import slice_stage

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}


def spec(config: Any, **args: Any) -> ModelSpec:
    return ModelSpec(factory="workers.models.hugging_face:causal_lm", args={"config": config, **args})


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_slices_compute_what_transformers_computes(config: dict[str, Any]) -> None:
    settings = {**config, "tie_word_embeddings": False}
    settings.pop("architectures", None)
    parsed = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.default_generator.manual_seed(4)  # as `build` does
    whole = transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        expected = whole(input_ids=tokens).logits
        for cuts in ([0, 5], [0, 1, 4, 5], [0, 2, 5]):
            layers = build(spec(config), seed=4)
            hidden = tokens
            for first, last in zip(cuts, cuts[1:], strict=False):  # noqa: RUF007  # read as (first, last)
                (hidden,) = slice_stage(layers, first, last).eval()(hidden)
            assert torch.equal(hidden, expected)


def test_a_config_file_serves_and_tying_is_a_choice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert sharing_layers(build(spec(str(tmp_path)), 0)) == ()
    assert sharing_layers(build(spec(str(tmp_path / "config.json"), tie_weights=True), 0)) == ((0, 4),)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported; use gpt2 or llama"),
        ({**GPT2, "n_head": 5}, "transformers refuses this gpt2 config"),
        ("/nowhere/config.json", "can't be read"),
    ],
)
def test_configs_that_cannot_serve_are_one_line(config: Any, text: str) -> None:
    with pytest.raises(BadModel) as caught:
        build(spec(config), 0)
    assert text in caught.value.text
    assert "\n" not in caught.value.text
