"""Any `nn.Module` as a graph: its forward pass runs once without data, and its calls are written down.

Modules are called as a whole where they are layers; what a model computes between them is recorded call by
call, as torch's own functions are called. So Python's control flow may be what it likes, as long as it does
not depend on the values of tensors. Sizes are followed, not frozen: a batch of another length runs through
the same graph.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from workers.graph.model_graph import GraphLayer, ModelGraph
from workers.graph.recorder import Recorder, Unrecordable

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def record(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    inputs: Mapping[str, str] = {},
    leaves_of: Callable[[str, nn.Module], bool] | None = None,
) -> ModelGraph:
    """Records the model's forward pass on this batch.

    Args:
        model: On the device `meta`, or any other; its weights are not read.
        batch: Name → tensor; those whose names the model's `forward` takes are passed on, as tensors
            without data.
        inputs: Parameter of the forward pass → name of the batch, where they differ.
        leaves_of: Says of (full name, module) whether it is a layer as a whole; by default `is_layer`.

    Raises:
        BadModel: The model takes other names, or what it computes depends on the values of tensors.
    """
    training, state = model.training, random.getstate()
    try:
        with _without_data(model):
            model.train()
            taken = names_taken(model, batch, inputs)
            graph, again = (_seeded(seed, model, batch, taken, leaves_of or is_layer) for seed in (0, 1))
            model.eval()
            evaluation = _record(model, batch, taken, leaves_of or is_layer)
    finally:
        random.setstate(state)
        model.train(training)
    if graph.fingerprint() != again.fingerprint():
        raise BadModel(
            f"{type(model).__name__} computes something else each time, as it draws numbers from "
            "Python's random: "
            "draw them from torch, in a module of its own"
        )
    names, others = ([layer.name for layer in each.layers] for each in (graph, evaluation))
    if names != others:
        different = next((a for a, b in zip_longest(names, others) if a != b), None) or "the last"
        raise BadModel(
            f"{type(model).__name__} has other layers in evaluation than in training, from {different} on; "
            "let the same modules run in both"
        )
    return replace(graph, evaluation=evaluation, recorded=True)


def check_sizes(graph: ModelGraph, batch: Mapping[str, Tensor], inputs: Mapping[str, str] = {}) -> None:
    """Checks that a recorded model computes the same for a batch of these sizes.

    Raises:
        BadModel: Its own code goes by the sizes: a loop over one, or a number made of one.
    """
    other = record(graph.model, batch, inputs=inputs)
    if other.fingerprint() == graph.fingerprint():
        return
    names = [layer.name for layer in graph.layers]
    where = next(
        (a.name for a, b in zip(graph.layers, other.layers, strict=False) if _differ(a, b)), names[-1]
    )
    sizes = ", ".join(f"{name} {list(batch[name].shape)}" for name in graph.taken if name in batch)
    raise BadModel(
        f"{type(graph.model).__name__} computes something else for {sizes} than for the batch that it "
        "was recorded "
        f"with, from {where} on: a loop over a size, or a number made of one; give batches of one "
        "size, or make that "
        "part a module of its own"
    )


def _differ(layer: GraphLayer, other: GraphLayer) -> bool:
    return repr(layer.calls) != repr(other.calls)


def _seeded(seed: int, *arguments: Any) -> ModelGraph:
    random.seed(seed)
    return _record(*arguments)


def _record(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    taken: Mapping[str, str],
    is_leaf: Callable[[str, nn.Module], bool],
) -> ModelGraph:
    whole: set[str] = set()
    first: Unrecordable | None = None
    compiling = False
    while True:
        recorder = Recorder(model, taken, is_leaf, whole)
        try:
            with _as_compiler() if compiling else nullcontext():
                return recorder.run(batch)
        except Unrecordable as error:
            first = first or error
            if not compiling:
                compiling = True
            elif recorder.failed_in:
                compiling = False
                whole.add(recorder.failed_in)
            else:  # in the code of the model itself
                raise BadModel(f"{type(model).__name__} {first}") from error.__cause__


@contextmanager
def _without_data(model: nn.Module) -> Iterator[None]:
    """Within, all parameters and buffers are on `meta`: as large, and empty."""
    empty: dict[int, Any] = {}

    def emptied(tensor: Tensor) -> Tensor:
        if id(tensor) not in empty:
            bare = tensor.detach().to("meta")
            empty[id(tensor)] = (
                nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
            )
        found: Tensor = empty[id(tensor)]
        return found

    changed: list[tuple[dict[str, Any], str, Any]] = []
    tables: Iterator[dict[str, Any]]
    try:
        for module in model.modules():
            tables = iter(
                (cast("dict[str, Any]", module._parameters), cast("dict[str, Any]", module._buffers))
            )
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:
                        changed.append((table, name, tensor))
                        table[name] = emptied(tensor)
        yield
    finally:
        for table, name, tensor in changed:
            table[name] = tensor


@contextmanager
def _as_compiler() -> Iterator[None]:
    """Within, models that ask are told that they are compiled: many then leave out branches on values."""
    original = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = original


def is_layer(name: str, module: nn.Module) -> bool:
    """Whether a module is a layer as a whole: torch's own modules, and blocks that a list or sequence
    repeats."""
    if isinstance(module, _CONTAINERS):
        return False
    if not any(True for _ in module.children()) or type(module).__module__.startswith("torch."):
        return True
    if not name.rpartition(".")[2].isdigit():
        return False
    return not any(
        isinstance(part, nn.ModuleList | nn.Sequential)
        and sum(1 for _ in part.children()) > 1
        and _repeats(part)
        for part in module.modules()
    )


def _repeats(container: nn.Module) -> bool:
    """Whether a list holds blocks, rather than single layers of torch."""
    return any(
        any(True for _ in child.children()) and not type(child).__module__.startswith("torch.")
        for child in container.children()
    )


def names_taken(model: nn.Module, batch: Mapping[str, Any], inputs: Mapping[str, str] = {}) -> dict[str, str]:
    """The model's forward parameters → names of the batch that they take.

    A parameter takes what bears its name. A model whose only parameter without a default bears another name
    takes `inputs`, or the first of the batch.

    Raises:
        BadModel: A parameter without a default finds nothing in the batch.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    known = {p.name for p in named}
    for parameter, name in inputs.items():
        if parameter not in known:
            raise BadModel(
                f"model.inputs: the forward pass has no {parameter}, but {', '.join(sorted(known))}"
            )
        if name not in batch:
            raise BadModel(f"model.inputs: the data has no {name}, but {', '.join(batch)}")
    taken = {p.name: p.name for p in named if p.name in batch} | dict(inputs)
    if not taken and not required and named:  # as of transformers: everything has a default
        return {named[0].name: "inputs" if "inputs" in batch else next(iter(batch))}
    missing = [name for name in required if name not in taken]
    if len(missing) == 1 and missing == required[:1] and len(required) == 1:
        return {missing[0]: "inputs" if "inputs" in batch else next(iter(batch)), **taken}
    if missing:
        raise BadModel(
            f"{type(model).__name__}.forward takes {', '.join(missing)}, which the data does not "
            f"have: it has {', '.join(batch)}; say which is which in model.inputs"
        )
    return taken
