"""The job's model: built from its factory, and made a graph of layers that can be cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
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
from workers.graph.recorder import WHOLE_BATCH
from workers.graph.recording import names_taken, record
from workers.graph.sequence import of_sequence
from workers.precision.int8_linear import quantize
from workers.precision.parameter_types import TRAINABLE, convert, converted, named_dtype
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
    construct = constructor(spec, batch)
    with torch.random.fork_rng(devices=cuda_devices()):
        seed_generators(seed)
        model = construct()
    return graph_of(spec, model, batch)


def constructor(spec: ModelSpec, batch: Mapping[str, Tensor] = TOKENS) -> Callable[[], Any]:
    """The factory with its arguments; of a declared graph it also calls the layers' constructors.

    The model has the parameters' types that `model.dtype` and `model.quantize` say, and those frozen that
    are not trained.

    Raises:
        BadModel: There is no such factory, or an argument is a secret that is not known here. What is
            returned raises it if the factory fails; or see `_freeze` and `quantize`.
    """
    factory = load(spec.factory, MODELS)
    try:
        args = filled(spec.args)
    except BadInput as error:
        raise BadModel(f"{spec.factory}: {error.text}") from error

    def construct() -> Any:
        try:
            model = factory(**args)
            if isinstance(model, DeclaredGraph):
                model = model.graph(batch)
            _prepare(spec, model)
            return model
        except TypeError as error:
            raise BadModel(f"{spec.factory} with args {spec.args}: {describe(error)}") from error
        except BadModel:
            raise
        except Exception as error:  # user code may raise anything
            raise BadModel(f"{spec.factory} failed: {describe(error)}") from error

    return construct


def graph_of(spec: ModelSpec, model: Any, batch: Mapping[str, Tensor] = TOKENS) -> ModelGraph:
    """The graph of what `constructor(spec)` built; its weights may be on `meta`.

    Raises:
        BadModel: The model can't be made a graph.
    """
    dtype = named_dtype(spec.dtype)
    graph = replace(_graph(spec, model, converted(batch, dtype)), dtype=dtype)
    if not graph.layers:
        raise BadModel(f"{spec.factory} returned a model without layers")
    return graph


def _graph(spec: ModelSpec, model: Any, batch: Mapping[str, Tensor]) -> ModelGraph:
    factory = spec.factory
    if isinstance(model, ModelGraph):
        return model
    if isinstance(model, nn.Sequential | nn.ModuleList):
        return _sequence(spec, model, "", model, batch)
    if not isinstance(model, nn.Module):
        raise BadModel(
            f"{factory} returned a {type(model).__name__}; it must return an nn.Sequential or "
            "nn.ModuleList of layers, any nn.Module with a forward pass, or a DeclaredGraph"
        )
    layers = getattr(model, "layers", None)
    if type(model).forward is not nn.Module.forward:
        return record(model, batch, inputs=spec.inputs)
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
    return _sequence(spec, model, "layers.", layers, batch)


def _sequence(
    spec: ModelSpec, model: nn.Module, prefix: str, container: nn.Module, batch: Mapping[str, Tensor]
) -> ModelGraph:
    named = [(prefix + name, layer) for name, layer in container._modules.items() if layer is not None]
    taken: tuple[str, ...] = ("inputs",)
    if named and inspect.signature(named[0][1].forward).parameters:
        taken = tuple(names_taken(named[0][1], batch, spec.inputs).values()) or taken
        if WHOLE_BATCH in taken:
            raise BadModel(
                f"{spec.factory}: the first layer of a sequence takes tensors, no dictionary of the batch; "
                "return a module whose forward pass calls the layers"
            )
    return of_sequence(model, named, taken)


def _prepare(spec: ModelSpec, model: Any) -> None:
    """Freezes parameters, then gives them their types. Anything but a model is refused later, by `_graph`."""
    if not isinstance(model, nn.Module | ModelGraph):
        return
    root = model.model if isinstance(model, ModelGraph) else model
    root.train()  # a model may freeze parameters there
    _freeze(spec, root)
    if (dtype := named_dtype(spec.dtype)) is not None:
        convert(model, dtype)
    if spec.quantize is not None:
        quantize(model)


def _freeze(spec: ModelSpec, model: nn.Module) -> None:
    """Has only those parameters trained that `model.train` and `model.freeze` leave.

    Raises:
        BadModel: A pattern matches no parameter, or nothing is left to train.
    """
    if not (spec.freeze or spec.train):
        return
    named = dict(model.named_parameters())
    for pattern in (*spec.freeze, *spec.train):
        if not any(fnmatchcase(name, pattern) for name in named):
            raise BadModel(
                f"model.freeze or model.train: {pattern!r} matches no parameter; there are "
                f"{', '.join([*named][:3])} and {max(0, len(named) - 3)} more"
            )
    for name, weight in named.items():
        chosen = not spec.train or any(fnmatchcase(name, pattern) for pattern in spec.train)
        frozen = any(fnmatchcase(name, pattern) for pattern in spec.freeze)
        if frozen or not chosen:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in named.values()):
        raise BadModel("model.freeze and model.train leave no parameter to train")


def check_trained(named: Iterable[tuple[str, nn.Parameter]], *, scaled: bool) -> None:
    """Checks that trainable parameters are of a type that can be trained.

    Args:
        named: (full name, parameter).
        scaled: Whether the job's loss is scaled, without which gradients in float16 vanish.

    Raises:
        BadModel: A trainable parameter is of another type.
    """
    for name, weight in named:
        if not weight.requires_grad:
            continue
        dtype = str(weight.dtype).removeprefix("torch.")
        if weight.dtype not in TRAINABLE:
            raise BadModel(
                f"parameter {name} is {dtype}; trained parameters must be float32, bfloat16 or float16: set "
                "model.dtype, or freeze it"
            )
        if weight.dtype is torch.float16 and not scaled:
            raise BadModel(
                f"parameter {name} is {dtype}, and the loss is not scaled, so that small gradients would "
                "vanish: set model.dtype: float16, or training.loss_scale"
            )
