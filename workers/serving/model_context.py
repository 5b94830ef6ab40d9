"""How large a sample a model takes: as it says itself, and as far as what was recorded of it holds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schemas.callables import MODELS
from schemas.errors import BadModel
from schemas.job_file.model import ModelSpec
from schemas.registry import TensorSchema
from workers.compute.batch_schema import empty_batch
from workers.graph.model_graph import ModelGraph
from workers.graph.recording import differing_layer
from workers.models.hugging_face import read_config
from workers.user_code import load

_LENGTHS = ("context", "max_position_embeddings", "n_positions")
_OTHERWISE_FROM = (
    "sliding_window",
    "attention_window",
    "window_size",
    "attention_chunk_size",
    "original_max_position_embeddings",
)

MOST_TIMES = 16
"""A sample may be so many times as large as the one that the model was tried with. Convolutions take any
size, and the memory for it is not for clients to choose."""
ALWAYS = 4096
"""Elements that a sample may have however small the one was that the model was tried with."""


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """How large a sample of a single pass may be.

    Attributes:
        tried: The inputs that the model was tried with, without the dimension of samples; empty: not known.
        recorded: Whether its layers were recorded with these: its own code may compute something else for
            larger ones.
        tokens: Most tokens of an input of one dimension; 0: the model does not say.
    """

    tried: Sequence[TensorSchema] = ()
    recorded: bool = False
    tokens: int = 0

    def refusal(self, sample: Mapping[str, Tensor]) -> str:
        """Why this sample is too large, in one line; empty: it is not."""
        for tried in self.tried:
            tensor = sample.get(tried.name)
            if tensor is not None and (why := self._refusal(tried, tuple(tensor.shape))):
                return f"{tried.name}: a sample of the shape {list(tensor.shape)} {why}"
        return ""

    def _refusal(self, tried: TensorSchema, shape: tuple[int, ...]) -> str:
        if self.tokens and len(tried.shape) == len(shape) == 1:
            return f"is longer than the {self.tokens} that this model takes" if shape[0] > self.tokens else ""
        usual = list(tried.shape)
        if self.recorded:
            larger = len(shape) != len(usual) or any(map(int.__gt__, shape, usual))
            return f"goes beyond {usual}, for which this model was recorded" if larger else ""
        most = max(MOST_TIMES * math.prod(usual), ALWAYS)
        text = f"has more than {most} elements; this model was tried with {usual}"
        return text if math.prod(shape) > most else ""


NO_LIMITS = SampleLimits()


def sample_limits(
    graph: ModelGraph, spec: ModelSpec, batch: Sequence[TensorSchema], most_tokens: int
) -> SampleLimits:
    """The limits of a model of single passes.

    Args:
        graph: The whole model; its weights are not read.
        spec: What it was made of.
        batch: The tensors that it was tried with.
        most_tokens: Of the longest text that is looked at.
    """
    taken = tuple(tensor for tensor in batch if tensor.name in graph.inputs)
    own = model_context(spec, graph.model)
    of_texts = own is not None and taken and all(len(tensor.shape) == 1 for tensor in taken)
    if not of_texts or own is None:
        return SampleLimits(taken, graph.recorded)
    tokens = min(own, most_tokens)
    if graph.recorded:
        try:
            tokens, _ = recorded_context(graph, spec, batch, tokens)
        except BadModel:  # nobody knows from which length on: so it is that of the recording
            tokens = 0
    return SampleLimits(taken, graph.recorded, tokens)


def model_context(spec: ModelSpec, model: object = None) -> int | None:
    """Most tokens of a sample by its configuration and its factory's arguments; None: neither says.

    Args:
        spec: Factory and arguments.
        model: What the factory made, where it is at hand; its `config` is read.

    Raises:
        BadModel: An argument `config` names a file that can't be read.
    """
    arguments = {**_defaults(spec.factory), **spec.args}
    named = arguments.get("config")
    if isinstance(named, str) and spec.factory in MODELS:  # of other factories it may be any text
        named = read_config(named)
    parts = (getattr(model, "config", None), named, arguments)
    told = [_told(part, name) for part in parts for name in _LENGTHS]
    return min((each for each in told if isinstance(each, int) and each > 1), default=None)


def otherwise_from(model: object) -> list[int]:
    """Lengths of sessions at which a model's own config says that it computes otherwise: windows, scaled
    positions."""
    config = getattr(model, "config", None)
    parts = (config, *(getattr(config, name, None) for name in ("rope_scaling", "rope_parameters")))
    told = [_told(part, name) for part in parts for name in _OTHERWISE_FROM]
    return [each for each in told if isinstance(each, int) and each > 0]


def recorded_context(
    graph: ModelGraph, spec: ModelSpec, batch: Sequence[TensorSchema], context: int
) -> tuple[int, str]:
    """Most tokens for which a recorded model computes what its own code does.

    A model was recorded with a short sample; its code may go by the length: families with a window leave it
    out where a text is shorter.

    Args:
        graph: The whole model; its weights are not read.
        spec: What it was made of.
        batch: The tensors that it was recorded with.
        context: As many as are asked for.

    Returns:
        Tokens, and why they are fewer than `context`; empty: they are not.

    Raises:
        BadModel: It computes otherwise, and its config does not say from which length on.
    """
    if not graph.recorded or not (because := _otherwise(graph, spec, batch, context)):
        return context, ""
    lengths = {each - less for each in otherwise_from(graph.model) for less in (0, 1)}
    for tokens in sorted(lengths, reverse=True):
        if 1 < tokens < context and not _otherwise(graph, spec, batch, tokens):
            return tokens, because
    raise BadModel(f"{because}: say a smaller serve.context, or make that part a module of its own")


def _otherwise(graph: ModelGraph, spec: ModelSpec, batch: Sequence[TensorSchema], tokens: int) -> str:
    """What it computes otherwise for so many tokens; empty: nothing."""
    alike = [tensor.shape for tensor in batch if tensor.name in graph.inputs]
    name = type(graph.model).__name__
    longer = [
        tensor.model_copy(update={"shape": (tokens,)}) if tensor.shape in alike else tensor
        for tensor in batch
    ]
    try:
        with torch.inference_mode(False):
            where = differing_layer(graph, empty_batch(longer, 1), spec.inputs)
    except BadModel as error:
        return error.text
    recorded = ", ".join(str(size) for size, *_ in alike)
    told = f"{name} computes something else for {tokens} tokens than for the {recorded} that it was recorded"
    return f"{told} with, from layer {where} on" if where else ""


def _told(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _defaults(factory: str) -> dict[str, Any]:
    try:
        parameters = inspect.signature(load(factory, MODELS)).parameters.values()
    except (ValueError, TypeError):
        return {}
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
