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
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any, cast, get_origin

import torch
from torch import Tensor, nn

from schemas.errors import BadModel
from workers.graph.model_graph import ModelGraph
from workers.graph.recorded_calls import merged
from workers.graph.recorder import WHOLE_BATCH, Constants, Recorder, Unrecordable
from workers.graph.values import leaves, replaced
from workers.precision.parameter_types import converted

_OF_OTHER_ARGUMENTS = (TypeError, KeyError, AttributeError, IndexError)
_NAMED = 4
"""Layers that a line names at most."""
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
    for name, module in model.named_modules():
        is_compiled = type(module).__name__ == "OptimizedModule"
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            raise BadModel(
                f"{type(model).__name__}: {name or 'the model'} is "
                f"{'compiled' if is_compiled else 'TorchScript'}, whose calls aren't recorded; "
                f"use the module that it was made of{' (training.compile compiles layers)' * is_compiled}"
            )
    state, is_leaf = random.getstate(), leaves_of or is_layer
    try:
        with _without_data(model):
            model.train()
            taken = names_taken(model, batch, inputs)
            random.seed(0)
            graph, joined = _record(model, batch, taken, is_leaf)
            random.seed(1)
            numbers = _numbers(model)
            again, _ = _record(model, batch, taken, is_leaf)
            changed = [name for name, value in _numbers(model).items() if numbers.get(name, value) != value]
            model.eval()
            evaluation, also_joined = _record(model, batch, taken, is_leaf)
    finally:
        random.setstate(state)
    if changed:
        raise BadModel(
            f"{type(model).__name__}: its forward pass changes {', '.join(changed[:3])} each time, so that "
            "what it computes may depend on how often it ran, and where; a recipe's schedule may count"
        )
    if graph.fingerprint() != again.fingerprint():
        raise BadModel(
            f"{type(model).__name__} computes something else each time, as it draws numbers from Python's "
            "random or finds what its first pass left: draw numbers from torch, in a module of its own, and "
            "make tables in the constructor, as buffers"
        )
    names, others = ([layer.name for layer in each.layers] for each in (graph, evaluation))
    if names != others:
        different = next((a for a, b in zip_longest(names, others) if a != b), None) or "the last"
        raise BadModel(
            f"{type(model).__name__} has other layers in evaluation than in training, from {different} on; "
            "let the same modules run in both"
        )
    graph, evaluation = (
        replace(each, layers=merged(each.layers, joined | also_joined)) for each in (graph, evaluation)
    )
    return replace(graph, evaluation=evaluation, recorded=True)


def _numbers(model: nn.Module) -> dict[str, float]:
    """Full name → value of the numbers that are attributes of its modules."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float) and key != "training"
    }


def differing_layer(graph: ModelGraph, batch: Mapping[str, Tensor], inputs: Mapping[str, str] = {}) -> str:
    """The first layer in which a recorded model computes something else for a batch of these sizes; empty:
    none does."""
    other = record(graph.model, converted(batch, graph.dtype), inputs=inputs)
    if other.fingerprint() == graph.fingerprint():
        return ""
    pairs = zip(graph.layers, other.layers, strict=False)
    return next((a.name for a, b in pairs if a.words != b.words), graph.layers[-1].name)


def check_sizes(graph: ModelGraph, batch: Mapping[str, Tensor], inputs: Mapping[str, str] = {}) -> None:
    """Checks that a recorded model computes the same for a batch of these sizes.

    Raises:
        BadModel: Its own code goes by the sizes: a loop over one, or a number made of one.
    """
    where = differing_layer(graph, batch, inputs)
    if not where:
        return
    sizes = ", ".join(f"{name} {list(batch[name].shape)}" for name in graph.taken if name in batch)
    raise BadModel(
        f"{type(graph.model).__name__} computes something else for {sizes} than for the batch that it "
        "was recorded "
        f"with, from {where} on: a loop over a size, or a number made of one; give batches of one "
        "size, or make that "
        "part a module of its own"
    )


def _record(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    taken: Mapping[str, str],
    is_leaf: Callable[[str, nn.Module], bool],
) -> tuple[ModelGraph, set[tuple[int, int]]]:
    """The graph, and the pairs of layers that must be one, with all between them."""
    whole: set[str] = set()
    first: Unrecordable | None = None
    compiling = placing = False
    while True:
        try:
            with ExitStack() as stack:
                if compiling:
                    stack.enter_context(_as_compiler())
                constants = stack.enter_context(_as_default_device(model)) if placing else {}
                recorder = Recorder(model, taken, is_leaf, whole, constants)
                return recorder.run(batch), recorder.joined
        except Unrecordable as error:
            if not placing and "device" in str(error) and "meta" in str(error):
                placing = True
                continue
            first = first or error
            if not compiling:
                compiling = True
            elif recorder.failed_in:
                compiling = False
                whole.add(recorder.failed_in)
            else:  # in the code of the model itself
                hint = _hint(taken) if isinstance(first.__cause__, _OF_OTHER_ARGUMENTS) else ""
                if not hint and (first.__cause__ is None or isinstance(first.__cause__, NotImplementedError)):
                    hint = _what_to_declare(model, is_leaf)
                elif type(first.__cause__).__module__.startswith("torch._dynamo"):
                    hint = (
                        "; leave torch.compile out of the model's code: training.compile compiles its layers"
                    )
                raise BadModel(f"{type(model).__name__} {first}{hint}") from error.__cause__


def _hint(taken: Mapping[str, str]) -> str:
    """What else may be wrong where the only argument bears no name of the batch: it may be a dictionary."""
    parameter, name = next(iter(taken.items()), ("", ""))
    if len(taken) != 1 or name in (parameter, WHOLE_BATCH):
        return ""
    return (
        f"; its {parameter} is the batch's {name}: if it is to be a dictionary of the whole batch, say "
        f'model.inputs: {{{parameter}: "{WHOLE_BATCH}"}}'
    )


def _what_to_declare(model: nn.Module, is_leaf: Callable[[str, nn.Module], bool]) -> str:
    """The two ways out for a model whose own code can't be recorded."""
    names: list[str] = []
    for name, module in model.named_modules():
        if name and is_leaf(name, module) and not any(name.startswith(f"{other}.") for other in names):
            names.append(name)
    some = f" {', '.join(names[:_NAMED])}{' …' * (len(names) > _NAMED)} as layers and" if names else ""
    return (
        "; put what depends on the data into a module of its own, which then runs as a whole, or declare the "
        f"graph: a factory that returns a workers.graph.declared.DeclaredGraph, with{some} "
        "that code within a layer"
    )


@contextmanager
def _without_data(model: nn.Module) -> Iterator[None]:
    """Within, all parameters and buffers are on `meta`: as large, and empty.

    What the model's code sets meanwhile, tables on `meta` for instance, is set back.
    """
    empty: dict[int, Any] = {}

    def emptied(tensor: Tensor) -> Tensor:
        if id(tensor) not in empty:
            bare = tensor.detach().to("meta")
            empty[id(tensor)] = (
                nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
            )
        found: Tensor = empty[id(tensor)]
        return found

    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        tables = cast("list[dict[str, Any]]", [module._parameters, module._buffers])
        before += [(table, dict(table)) for table in (vars(module), *tables)]
    try:
        for module in model.modules():
            for table in cast("list[dict[str, Any]]", [module._parameters, module._buffers]):
                table.update({name: emptied(tensor) for name, tensor in table.items() if tensor is not None})
        yield
    finally:
        for table, content in before:
            table.clear()
            table.update(content)


@contextmanager
def _as_default_device(model: nn.Module) -> Iterator[Constants]:
    """Within, `meta` is the device of tensors that the model's code makes without one, and of those that are
    attributes of its modules; yields these with what they stand for."""
    constants: Constants = {}
    before: list[tuple[dict[str, Any], str, Any]] = []

    def emptied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            return leaf
        bare = leaf.detach().to("meta")
        constants[id(bare)] = (bare, leaf)
        return bare

    for module in model.modules():
        for name, held in vars(module).items():
            if name not in ("_parameters", "_buffers") and any(isinstance(x, Tensor) for x in leaves(held)):
                before.append((vars(module), name, held))
    try:
        for table, name, held in before:
            table[name] = replaced(held, emptied)
        with torch.device("meta"):
            yield constants
    finally:
        for table, name, held in before:
            table[name] = held


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
    takes all of the batch, where it is annotated as a dictionary (`WHOLE_BATCH`); else `inputs`, or the first
    of the batch. A forward pass with nothing but `**names` takes all names.

    Raises:
        BadModel: A parameter without a default finds nothing in the batch.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not named and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {name: name for name in batch}
    required = [p.name for p in named if p.default is p.empty]
    known = {p.name for p in named}
    for parameter, name in inputs.items():
        if parameter not in known:
            raise BadModel(
                f"model.inputs: the forward pass has no {parameter}, but {', '.join(sorted(known))}"
            )
        if name not in batch and name != WHOLE_BATCH:
            raise BadModel(f"model.inputs: the data has no {name}, but {', '.join(batch)}")
    taken = {p.name: p.name for p in named if p.name in batch} | dict(inputs)
    if not taken and not required and named:  # as of transformers: everything has a default
        return {named[0].name: "inputs" if "inputs" in batch else next(iter(batch))}
    missing = [name for name in required if name not in taken]
    if len(missing) == 1 and missing == required[:1] and len(required) == 1:
        if _takes_a_dictionary(model, missing[0]):
            return {missing[0]: WHOLE_BATCH, **taken}
        return {missing[0]: "inputs" if "inputs" in batch else next(iter(batch)), **taken}
    if missing:
        raise BadModel(
            f"{type(model).__name__}.forward takes {', '.join(missing)}, which the data does not "
            f"have: it has {', '.join(batch)}; say which is which in model.inputs"
        )
    return taken


def _takes_a_dictionary(model: nn.Module, parameter: str) -> bool:
    """Whether a parameter of the forward pass is annotated as a dictionary or another mapping."""
    try:
        kind = inspect.signature(model.forward, eval_str=True).parameters[parameter].annotation
    except (NameError, AttributeError, TypeError, SyntaxError):  # the text of an annotation may be anything
        return False
    kind = get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, Mapping)
