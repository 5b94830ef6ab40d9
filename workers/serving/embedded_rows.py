"""A text's vector: what a model's last layers know of its tokens, as one (width,) float32 (ADR-0154).

An encoder gives it, or rows that are averaged. Of a model of logits it is the mean of the rows in front of
the layer that makes the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from schemas.errors import BadInput
from workers.graph.model_graph import Value

VECTORS = ("embeddings", "sentence_embedding", "embedding", "text_embeds")
"""Outputs that are vectors: (samples, width)."""
ROWS = ("last_hidden_state", "token_embeddings", "hidden_states")
"""Outputs with a row for each token: (samples, tokens, width); they are averaged."""
POOLED = ("pooler_output",)
"""Vectors that are taken only where there are no rows: they are made for the next-sentence task."""


def inputs_of(tokens: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """A sample of a model that takes tokens.

    Args:
        tokens: (tokens,) int64.
        names: The model's inputs: one takes the tokens, others may be a mask, types or positions of tokens.

    Raises:
        BadInput: The model takes something else.
    """
    found: dict[str, Tensor] = {}
    takers = []
    for name in names:
        if "mask" in name:
            found[name] = torch.ones_like(tokens)
        elif "type" in name:
            found[name] = torch.zeros_like(tokens)
        elif "position" in name:
            found[name] = torch.arange(len(tokens), dtype=torch.int64)
        else:
            takers.append(name)
            found[name] = tokens
    if len(takers) != 1:
        raise BadInput(f"it has no vectors of texts: it takes {', '.join(names)}, not tokens alone")
    return found


def pooled_output(named: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """What an encoder's outputs come to: what it is, and (samples, width).

    Raises:
        BadInput: None of them is a vector or a row for each token.
    """
    for name in VECTORS:
        if name in named and named[name].dim() == 2:
            return name, named[name]
    for name in ROWS:
        if name in named and named[name].dim() == 3:
            return f"mean of {name}", named[name].mean(dim=1)
    for name in POOLED:
        if name in named and named[name].dim() == 2:
            return name, named[name]
    told = ", ".join(f"{name} {tuple(value.shape)}" for name, value in named.items()) or "nothing"
    wanted = ", ".join((*VECTORS, *ROWS, *POOLED))
    raise BadInput(f"it has no vectors of texts: it gives {told}, and none is one of {wanted}")


def pooled_rows(known: Mapping[str, Value], layer: str) -> tuple[str, Tensor]:
    """The mean of the rows that `layer` takes: what it is, and (samples, width).

    Raises:
        BadInput: What it takes is no single row for each token.
    """
    given = [
        tensor for value in known.values() for tensor in (value if isinstance(value, tuple) else (value,))
    ]
    rows = [
        tensor
        for tensor in given
        if isinstance(tensor, Tensor) and tensor.dim() == 3 and tensor.is_floating_point()
    ]
    if len(rows) != 1:
        raise BadInput(
            f"it has no vectors of texts: {len(rows)} tensors reach its last layer {layer}, not one row for "
            "each token"
        )
    return f"mean of the rows in front of layer {layer}", rows[0].mean(dim=1)
