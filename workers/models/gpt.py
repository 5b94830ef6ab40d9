"""A byte-level decoder-only GPT as a flat `nn.Sequential`, so that it can be cut behind any layer.

Pre-norm blocks with GELU (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


class Embedding(nn.Module):
    """Token plus learned position: (samples, tokens) int64 → (samples, tokens, width) float."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        # a wave of several sessions is longer than each: `workers.serving` gives a row for each
        positions = self.position.weight[:length]
        if positions.shape[0] < length:
            context = self.position.num_embeddings
            raise ValueError(f"samples of {length} tokens exceed the model's context of {context}")
        embedded: Tensor = self.dropout(self.token(tokens) + positions)
        return embedded


class Block(nn.Module):
    """Causal self-attention and a 4× wide MLP, each on a residual: shapes stay (samples, tokens, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_up = nn.Linear(width, 4 * width)
        self.mlp_down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention_output(self._attend(self.attention_norm(x))))
        hidden = functional.gelu(self.mlp_up(self.mlp_norm(x)))
        output: Tensor = x + self.dropout(self.mlp_down(hidden))
        return output

    def _attend(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        split = self.query_key_value(x).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # (samples, heads, tokens, width / heads) each
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(samples, tokens, width)


class Head(nn.Module):
    """(samples, tokens, width) → logits (samples, tokens, vocabulary)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.projection(self.norm(x))
        return logits


def byte_gpt(
    layers: int = 6,
    width: int = 192,
    heads: int = 6,
    context: int = 128,
    vocabulary: int = 256,
    dropout: float = 0.0,
) -> nn.Sequential:
    """The example's model: `embed`, `block_0` … `block_{layers-1}`, `head`.

    Args:
        layers: Number of transformer blocks.
        width: Features per token; a multiple of `heads`.
        heads: Attention heads.
        context: Longest sample, in tokens.
        vocabulary: 256 for bytes.
        dropout: Dropout after the embedding and on both residuals of each block.

    Raises:
        ValueError: A size is impossible.
    """
    if min(layers, width, heads, context, vocabulary) < 1:
        raise ValueError("layers, width, heads, context and vocabulary must be at least 1")
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    named["embed"] = Embedding(vocabulary, context, width, dropout)
    for index in range(layers):
        named[f"block_{index}"] = Block(width, heads, dropout)
    named["head"] = Head(width, vocabulary)
    _initialise(named, layers)
    return nn.Sequential(named)


@torch.no_grad()
def _initialise(named: OrderedDict[str, nn.Module], layers: int) -> None:
    """Sets weights that keep a token's variance at 1 through the layers, and logits near uniform.

    Linear: normal(0, 1/sqrt(inputs)); those added to the residual are scaled by a further 1/sqrt(2·layers),
    as in GPT-2. GPT-2's own 0.02 everywhere is meant for wide models: at width 192 the loss was 3.0 after the
    60 steps of examples/stdlib-gpt.yaml, and 2.3 with these weights.
    """
    for layer in named.values():
        for name, parameter in layer.named_parameters():
            if name == "token.weight":
                parameter.normal_(0.0, 1.0)
            elif name == "position.weight":
                parameter.normal_(0.0, 0.1)
            elif name == "projection.weight":
                parameter.normal_(0.0, 0.02)
            elif parameter.dim() > 1:
                deep = name.startswith(("attention_output", "mlp_down"))
                scale = (2 * layers) ** -0.5 if deep else 1.0
                parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.zero_()
