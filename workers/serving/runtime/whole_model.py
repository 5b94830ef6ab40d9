"""What a whole model does, as far as it can be told where some of its weights are elsewhere (ADR-0167).

An instance of a large model has the weights of its own layers; those of others are on `meta`, where there are
shapes and no numbers. Values pass through all layers all the same: a number that meets a shape becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

from bus.logs import get_logger
from workers.graph.model_graph import ModelGraph, Value
from workers.serving.cache_check import check_cache, differing_row, sample_tokens
from workers.serving.exact_arithmetic import Arithmetic
from workers.serving.retained_rows import Boundary
from workers.serving.stage_model import run_layers, stage_layers
from workers.user_code import describe

log = get_logger("serving")

_META = torch.device("meta")
_TRIED = 6
_PLACES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Shapes(TorchFunctionMode):
    """Within, all tensors of a call are on `meta` if one of them is; notes attention without any mask."""

    def __init__(self) -> None:
        super().__init__()
        self.unmasked = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if tree_any(_is_shape, (args, kwargs)):
            args, kwargs = tree_map_only(Tensor, _shape, (args, kwargs))
            args, kwargs = _without_places(function, args, kwargs)
        if function is functional.scaled_dot_product_attention:
            given = dict(zip(_PLACES, args, strict=False)) | kwargs
            masked = given.get("attn_mask") is not None or given.get("is_causal")
            self.unmasked |= not masked and given["query"].shape[-2] > 1
        return function(*args, **kwargs)


def _without_places(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Devices that a call names are `meta`: `a.to(b.device)`, where b has numbers and a has none."""
    args, kwargs = tree_map_only(torch.device, lambda _: _META, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": _META}
    if function is Tensor.to and len(args) > 1 and isinstance(args[1], str | int):
        args = (args[0], _META, *args[2:])
    return args, kwargs


def _is_shape(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _shape(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def values_behind(
    graph: ModelGraph, layers: int, tokens: Tensor, shapes: _Shapes | None = None
) -> dict[str, Value]:
    """Wire → value behind the first `layers` layers, of one session: numbers where all weights are here.

    Args:
        graph: The whole model.
        layers: How many layers.
        tokens: (tokens,) int64.
        shapes: Notes what it meets.

    Raises:
        Exception: What the model raises.
    """
    found = stage_layers(graph, 0, layers)
    with shapes or _Shapes():
        return run_layers(found, found[0].slice.unpacked([tokens[None]]))


@dataclass(frozen=True, slots=True)
class TriedAnswer:
    """What a model gives for some tokens.

    Attributes:
        shape: Of its logits, or of its first output; None: it takes no tokens alone.
        looks_ahead: Whether what it gives for a token depends on tokens behind it.
    """

    shape: tuple[int, ...] | None
    looks_ahead: bool = False

    @property
    def is_logits(self) -> bool:
        """Whether it is a row for each token, made of it and those before: such a model continues texts."""
        return self.shape is not None and len(self.shape) == 3 and self.shape[:2] == (1, _TRIED)


def whole_answer(graph: ModelGraph) -> TriedAnswer:
    """Tries the whole model with a few tokens, and with another last one."""
    tokens = sample_tokens(graph, _TRIED)[0]
    shapes = _Shapes()
    try:
        found = _output(graph, tokens, shapes)
        if found is None:
            return TriedAnswer(None)
        shape = tuple(found.shape)
        if found.is_meta:
            return TriedAnswer(shape, shapes.unmasked)
        tokens[-1] = tokens[:-1].min() if tokens[-1] > tokens[:-1].min() else tokens[-1] + 1
        other = _output(graph, tokens, shapes)
    except Exception as error:  # the model's own code may raise anything
        log.info("the model takes no tokens alone", reason=describe(error))
        return TriedAnswer(None)
    answer = TriedAnswer(shape)
    if not answer.is_logits or other is None:
        return answer
    return TriedAnswer(shape, differing_row(found[0, :-1], other[0, :-1]) is not None)


def _output(graph: ModelGraph, tokens: Tensor, shapes: _Shapes) -> Tensor | None:
    values = values_behind(graph, len(graph), tokens, shapes)
    named = stage_layers(graph, len(graph) - 1, len(graph))[0].slice.named_outputs(values)
    return named.get("logits", next(iter(named.values()), None))


def stage_sample(
    graph: ModelGraph, first: int, context: int, arithmetic: Arithmetic, most_rows: int
) -> tuple[Boundary, str]:
    """What a stage is tried with: tokens, or rows of the shapes that the stages before it give.

    Returns:
        The sample, and why there is none: then the stage can't be served with a cache. Empty: there is one.
    """
    tokens = sample_tokens(graph, context)
    if first == 0:
        return tokens, ""
    layers = stage_layers(graph, 0, first)
    if not any(map(_is_elsewhere, layers)):
        check = check_cache(graph, 0, first, tokens, arithmetic=arithmetic, most_rows=most_rows)
        return check.boundary, check.because
    part = layers[-1].slice
    try:
        tensors = part.packed(values_behind(graph, first, tokens[0]))
    except Exception as error:  # the model's own code may raise anything
        return (), f"what reaches layer {graph.layers[first].name} is not known here: {describe(error)}"
    sized = any(name in part.sizes for name in part.outgoing)
    generator = torch.Generator().manual_seed(0)
    rows: list[Tensor] = []
    for number, tensor in enumerate(tensors):
        if sized and number == len(tensors) - 1:  # one line for each row, −1 for the number of rows
            rows.append(torch.where(tensor == context, -1, tensor).expand(context, -1))
        elif tensor.shape[:2] != (1, context):
            what = f"what reaches layer {graph.layers[first].name}"
            return (), f"{what} does not have a row for each token: {tuple(tensor.shape)}"
        elif not tensor.is_meta:
            rows.append(tensor[0])
        elif tensor.is_floating_point():
            rows.append(torch.randn(tensor.shape[1:], generator=generator).to(tensor.dtype))
        else:
            rows.append(torch.zeros(tensor.shape[1:], dtype=tensor.dtype))
    return tuple(rows), ""


def history_bytes(graph: ModelGraph, last: int, context: int) -> int:
    """Bytes for each row that a stage without a cache keeps of a session for the next one; 0: not known.

    Args:
        graph: The whole model.
        last: The layer behind the stage's last.
        context: Rows of a session.
    """
    if last == len(graph):
        return 0
    try:
        with torch.device("meta"):
            tokens = torch.zeros(context, dtype=torch.int64)
        tensors = stage_layers(graph, last - 1, last)[0].slice.packed(values_behind(graph, last, tokens))
    except Exception as error:  # the model's own code may raise anything
        log.info("what sessions take is not known", reason=describe(error))
        return 0
    return -(-sum(tensor.nbytes for tensor in tensors) // context)


def _is_elsewhere(layer: nn.Module) -> bool:
    return any(weight.is_meta for weight in (*layer.parameters(), *layer.buffers()))
