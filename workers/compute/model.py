"""The job's model: built from its factory, and made a graph of layers that can be cut."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bus.wire.secret_urls import filled
from schemas.callables import MODELS
from schemas.errors import BadInput, BadModel
from schemas.job_file.model import ModelSpec
from workers.graph.declared import DeclaredGraph
from workers.graph.model_graph import ModelGraph
from workers.graph.randomness import cuda_devices, seed_generators
from workers.graph.recording import names_taken, record
from workers.graph.sequence import of_sequence
from workers.user_code import describe, load

TOKENS = {"inputs": torch.empty(1, 2, dtype=torch.int64), "targets": torch.empty(1, 2, dtype=torch.int64)}
"""The batch that a model is built for where no other is known: some tokens and their successors."""


def build(spec: ModelSpec, seed: int, batch: Mapping[str, Tensor] = TOKENS) -> ModelGraph:
    """Calls the factory and makes its model a graph.

    The factory returns an `nn.Sequential` or `nn.ModuleList` (or a module without a forward pass of its own
    that has all parameters in one of those, under the name `layers`): a sequence. Or a `DeclaredGraph`. Or
    any other `nn.Module`, whose forward pass is recorded. The same seed gives the same initial weights; the
    caller's generator is left unchanged.

    Args:
        spec: The job's section `model`.
        seed: The job's `training.seed`.
        batch: A batch, by name; its values are not read.

    Raises:
        BadModel: The factory fails or returns something else; the model can't be made a graph; or an
            argument is a secret that is not known here.
    """
    factory = load(spec.factory, MODELS)
    with torch.random.fork_rng(devices=cuda_devices()):
        seed_generators(seed)
        try:
            args = filled(spec.args)
        except BadInput as error:
            raise BadModel(f"{spec.factory}: {error.text}") from error
        try:
            model = factory(**args)
        except TypeError as error:
            raise BadModel(f"{spec.factory} with args {spec.args}: {describe(error)}") from error
        except BadModel:
            raise
        except Exception as error:  # user code may raise anything
            raise BadModel(f"{spec.factory} failed: {describe(error)}") from error
    graph = _graph(spec.factory, model, batch)
    if not graph.layers:
        raise BadModel(f"{spec.factory} returned a model without layers")
    return graph


def _graph(factory: str, model: Any, batch: Mapping[str, Tensor]) -> ModelGraph:
    if isinstance(model, DeclaredGraph):
        return model.graph(batch)
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return _sequence(model, "", model, batch)
    if not isinstance(model, nn.Module):
        raise BadModel(
            f"{factory} returned a {type(model).__name__}; it must return an nn.Sequential or "
            "nn.ModuleList of layers, any nn.Module with a forward pass, or a DeclaredGraph"
        )
    layers = getattr(model, "layers", None)
    if type(model).forward is not nn.Module.forward:
        return record(model, batch)
    if not isinstance(layers, nn.Sequential | nn.ModuleList):
        raise BadModel(
            f"{factory} returned a {type(model).__name__}, which has no forward pass and no .layers; "
            "it must return an "
            "nn.Sequential, an nn.ModuleList, or a module with one of them as .layers"
        )
    outside = [name for name, _ in model.named_parameters() if not name.startswith("layers.")]
    if outside:
        raise BadModel(
            f"{factory} returned a {type(model).__name__} with parameters outside its .layers "
            f"({', '.join(outside[:3])}): make them layers too, so that every stage can be cut off"
        )
    return _sequence(model, "layers.", layers, batch)


def _sequence(model: nn.Module, prefix: str, container: nn.Module, batch: Mapping[str, Tensor]) -> ModelGraph:
    named = [(prefix + name, layer) for name, layer in container._modules.items() if layer is not None]
    taken: tuple[str, ...] = ("inputs",)
    if named and inspect.signature(named[0][1].forward).parameters:
        taken = tuple(names_taken(named[0][1], batch).values()) or taken
    return of_sequence(model, named, taken)


def check_trained(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Checks that trainable parameters are float32: exact sums and the fused optimizer take nothing else.

    Raises:
        BadModel: A trainable parameter is of another type.
    """
    for name, weight in named:
        if weight.requires_grad and weight.dtype is not torch.float32:
            raise BadModel(
                f"parameter {name} is {str(weight.dtype).removeprefix('torch.')}; trainable parameters must "
                "be float32; for bf16 compute set training.precision: bf16"
            )
