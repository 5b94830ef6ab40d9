"""Hugging Face causal language models (Llama, GPT-2) as a flat `nn.Sequential` that can be cut anywhere.

The layers are transformers' own, called as its model calls them after `inputs_embeds`, so that the logits are
the same to the bit. It needs the extra: `pip install 'dmsc[hf]'`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from workers.user_code import folders


class LlamaEmbedding(nn.Module):
    """(samples, tokens) int64 → (samples, tokens, width)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded


class LlamaLayer(nn.Module):
    """One decoder layer; it computes its own rotary positions, which have no parameters."""

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        self.layer = model.model.layers[index]
        self.rotary = model.model.rotary_emb

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, position_ids=positions)
        # without a mask, scaled dot product attention is causal
        return _tensor(
            self.layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        )


class LlamaHead(nn.Module):
    """(samples, tokens, width) → logits (samples, tokens, vocabulary)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.model.norm
        self.lm_head = model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


class Gpt2Embedding(nn.Module):
    """Token plus learned position, and dropout: (samples, tokens) int64 → (samples, tokens, width)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.transformer.wte, model.transformer.wpe, model.transformer.drop

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        embedded: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        return embedded


class Gpt2Layer(nn.Module):
    """One block."""

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        self.block = model.transformer.h[index]

    def forward(self, hidden: Tensor) -> Tensor:
        return _tensor(self.block(hidden))


class Gpt2Head(nn.Module):
    """(samples, tokens, width) → logits (samples, tokens, vocabulary)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ln_f = model.transformer.ln_f
        self.lm_head = model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.ln_f(hidden))
        return logits


_FAMILIES = {
    "llama": (LlamaEmbedding, LlamaLayer, LlamaHead, "num_hidden_layers"),
    "gpt2": (Gpt2Embedding, Gpt2Layer, Gpt2Head, "n_layer"),
}


def causal_lm(config: dict[str, Any] | str, tie_weights: bool = False) -> nn.Sequential:
    """A Llama or GPT-2 model with new weights: `embed`, `layer_0` …, `head`.

    Args:
        config: A `config.json` as a dictionary, its path, or the path of its folder.
        tie_weights: Share the embedding with the output head. Both must then be in one stage, so by default
            the head has its own weights.

    Raises:
        BadModel: transformers is not installed, there is no such file, or the model family is not supported.
    """
    try:
        import transformers
    except ImportError:
        raise BadModel(
            "Hugging Face models need transformers on every node: pip install 'dmsc[hf]'"
        ) from None
    settings = dict(config) if isinstance(config, dict) else read_config(config)
    family = settings.pop("model_type", None)
    if family not in _FAMILIES:
        raise BadModel(f"model_type {family!r} is not supported; use {' or '.join(sorted(_FAMILIES))}")
    settings.pop("architectures", None)
    settings |= {"tie_word_embeddings": tie_weights, "use_cache": False}
    try:
        parsed = transformers.AutoConfig.for_model(family, **settings)
        # transformers does not annotate this function, and is not installed everywhere
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call,unused-ignore]
            parsed, attn_implementation="sdpa"
        )
    except (TypeError, ValueError, KeyError) as error:
        raise BadModel(f"transformers refuses this {family} config: {str(error).splitlines()[0]}") from error
    embedding, layer, head, count = _FAMILIES[family]
    named: OrderedDict[str, nn.Module] = OrderedDict(embed=embedding(model))
    for index in range(getattr(parsed, count)):
        named[f"layer_{index}"] = layer(model, index)
    named["head"] = head(model)
    return nn.Sequential(named).float()


def found_config(named: str | Path) -> Path:
    """Where a config lies that a job names: relative paths are looked for beside users' code first.

    So a config that travels with the job's code is found on every node.
    """
    places = [folder / named for folder in folders()]
    return next((place for place in places if place.exists()), Path(named))


def read_config(named: str | Path) -> dict[str, Any]:
    """The `config.json` at this path, or in this folder; raises `BadModel` if it can't be read."""
    path = found_config(named)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise BadModel(f"config {file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise BadModel(f"config {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise BadModel(f"config {file} is not a JSON object")
    return config


def _tensor(output: Any) -> Tensor:
    """Layers return a tensor, or in older versions of transformers a tuple that begins with one."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
