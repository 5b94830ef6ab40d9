"""Models of transformers from a config: cut anywhere to the same bits, equal to transformers' own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.errors import BadModel
from schemas.job_file.model import ModelSpec
from tests.unit.workers.graph.test_recording import through
from workers.compute.model import build
from workers.graph.stage_module import slice_stage

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed")

FACTORY = "workers.models.transformers_model:transformers_model"
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 99,
}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 99,
    "decoder_start_token_id": 0,
}
IDS = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 9, dtype=torch.int64)
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "llama": ("causal-lm", {**SMALL, "num_key_value_heads": 1, "tie_word_embeddings": True}, {"inputs": IDS}),
    "gpt2": ("causal-lm", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 99}, {"input_ids": IDS}),
    "bert": ("masked-lm", SMALL, {"input_ids": IDS, "attention_mask": MASK}),
    "t5": ("seq2seq-lm", T5, {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :5]}),
    "vit": ("image-classification", {**SMALL, "image_size": 16, "patch_size": 4}, {"pixel_values": PIXELS}),
}


def spec(family: str, **more: Any) -> tuple[ModelSpec, dict[str, Tensor]]:
    task, config, batch = FAMILIES[family]
    args = {"config": {**config, "model_type": family}, "task": task, **more}
    return ModelSpec(factory=FACTORY, args=args), batch


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_is_cut_anywhere_to_the_same_bits(family: str) -> None:
    model, batch = spec(family)
    graph = build(model, 3, batch)
    plain = graph.model.eval()(**({"input_ids": IDS} if "inputs" in batch else batch)).logits
    whole = slice_stage(graph, 0, len(graph), needed=["logits"]).eval()
    found = whole.run({name: batch[name] for name in graph.inputs})
    assert torch.equal(whole.slice.named_outputs(found)["logits"], plain)

    loss, gradients = through(graph, [0, len(graph)], batch, needed=["logits"])
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    shared = {name for name, layers in graph.users.items() if len(layers) > 1}
    for _ in range(3):
        inner = sorted(draw.sample(range(1, len(graph)), 2))
        other, parts = through(graph, [0, *inner, len(graph)], batch, needed=["logits"])
        assert other == loss
        for name in gradients.keys() - shared:
            gradient = gradients[name]
            assert gradient is None or torch.equal(gradient, parts[name]), (inner, name)


def test_only_adapters_are_trained() -> None:
    pytest.importorskip("peft", reason="the extra `hf` is not installed")
    model, batch = spec("llama", lora={"r": 2, "target_modules": ["q_proj", "v_proj"]})
    graph = build(model, 3, batch)
    trained = [name for name, weight in graph.model.named_parameters() if weight.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all(".lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"config": {"hidden_size": 8}}, "has no model_type"),
        ({"config": {"model_type": "llama", "auto_map": {}}}, "names code of its own"),
        ({"config": {"model_type": "llama"}, "auto_map": {}}, "names code of its own"),
        ({"config": {"model_type": "llama"}, "attention": "some/kernel"}, "code that would be downloaded"),
        ({"config": {"model_type": "llama"}}, "names no class that transformers has"),
        ({"config": {"model_type": "llama"}, "task": "juggling"}, "task 'juggling' is not known"),
        ({"config": {"model_type": "lama"}, "task": "causal-lm"}, "transformers refuses this lama config"),
        ({"config": "nowhere"}, "config nowhere can't be read"),
    ],
)
def test_configs_that_cannot_serve_are_one_line(args: dict[str, Any], text: str) -> None:
    with pytest.raises(BadModel, match=text) as caught:
        build(ModelSpec(factory=FACTORY, args=args), 0)
    assert "\n" not in caught.value.text
