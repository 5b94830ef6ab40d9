"""Whether a model takes all ids that its data may hold: found at submission, not at the first rare token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from schemas.task_graph import LayerProfile


@contextmanager
def embeddings_checked(
    vocabulary: int | None, model: nn.Module, batch: Mapping[str, Tensor]
) -> Iterator[None]:
    """While it is entered, embeddings refuse a vocabulary that is larger than theirs, when the batch runs.

    An embedding of ids is recognised by what it is given: one of the batch's tensors of ids.

    Args:
        vocabulary: The largest id that the data may hold, plus one; None: it holds no ids.
        model: All layers.
        batch: What the model is given; ids are (samples, tokens) int64.

    Raises:
        BadModel: In the embedding's forward: it is too small.
    """
    ids = [tensor for tensor in batch.values() if tensor.dtype == torch.int64 and tensor.ndim == 2]
    hooks = [
        module.register_forward_pre_hook(_check(name, vocabulary, ids))
        for name, module in model.named_modules()
        if vocabulary is not None and isinstance(module, nn.Embedding)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check(name: str, vocabulary: int, ids: list[Tensor]) -> Any:
    def check(module: nn.Embedding, inputs: tuple[Any, ...]) -> None:
        given = inputs[0] if inputs else None
        if module.num_embeddings >= vocabulary or not isinstance(given, Tensor):
            return
        if any(given.shape == each.shape and torch.equal(given.cpu(), each.cpu()) for each in ids):
            raise BadModel(f"layer {name} embeds {module.num_embeddings:,} ids, {_remedy(vocabulary)}")

    return check


def check_logits(vocabulary: int | None, layers: Sequence[LayerProfile]) -> None:
    """Refuses logits, of a job with cross entropy, that are fewer than the ids.

    Args:
        vocabulary: As of `embeddings_checked`.
        layers: The model's, whose last one gives (samples, tokens, logits).

    Raises:
        BadModel: They are fewer.
    """
    last = layers[-1]
    found = max((output.shape[-1] for output in last.output if len(output.shape) == 2), default=0)
    if vocabulary is not None and 0 < found < vocabulary:
        raise BadModel(f"layer {last.name} gives {found:,} logits, {_remedy(vocabulary)}")


def _remedy(vocabulary: int) -> str:
    return (
        f"and the tokenizer has ids up to {vocabulary - 1:,}; give the model a vocabulary of at least "
        f"{vocabulary:,}"
    )
