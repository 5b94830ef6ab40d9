"""The tensors of a built model: found under all their names, and moved between memory and `meta`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from workers.build.build_trace import BuildTrace

_DEEP = 6
"""Levels of lists, dictionaries and objects in which tensors are looked for."""


def modules_of(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """(full name, module) of all modules of a factory's result, each under its first name."""
    seen: set[nn.Module] = set()
    for prefix, root in _roots(model):
        yield from root.named_modules(seen, prefix)


def _roots(model: Any) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Module):
        yield "", model
    elif isinstance(model, dict):
        for key, value in model.items():
            yield from ((f"{key}.{name}".rstrip("."), module) for name, module in _roots(value))
    elif isinstance(model, list | tuple):
        for index, value in enumerate(model):
            yield from ((f"{index}.{name}".rstrip("."), module) for name, module in _roots(value))
    elif isinstance(inner := getattr(model, "model", None), nn.Module):
        yield "", inner


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Full name → parameter or buffer, shared ones under each of their names."""
    found: dict[str, Tensor] = {}
    for prefix, root in _roots(model):
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found[f"{path}.{name}" if path else name] = tensor
    return found


def unsaved_names(model: Any) -> set[str]:
    """Full names of the buffers that are no part of the model's weights."""
    return {
        f"{path}.{name}" if path else name
        for prefix, root in _roots(model)
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def attribute_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module holds in plain attributes, lists, dictionaries and objects of its own."""
    own = {"_parameters", "_buffers", "_modules"}
    seen: set[int] = set()
    yield from _inside([value for key, value in vars(module).items() if key not in own], seen, _DEEP)


def _inside(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth == 0 or id(value) in seen or isinstance(value, nn.Module | type | str | bytes | int | float):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items: Any = list(value.values())
    elif isinstance(value, list | tuple | set):
        items = list(value)
    elif callable(value) and hasattr(value, "__code__"):
        cells = (getattr(value, "__closure__", None) or ()) if depth > 1 else ()
        items = [cell.cell_contents for cell in cells if _is_filled(cell)]
    else:
        items = list(getattr(value, "__dict__", {}).values())
    for item in items:
        yield from _inside(item, seen, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def move_to_meta(model: Any, chosen: Callable[[str], bool], trace: BuildTrace | None = None) -> None:
    """Puts the chosen parameters and buffers on `meta`, shared ones as shared ones.

    Args:
        model: The factory's result, changed in place.
        chosen: Of a full name. A tensor with several names moves only if all are chosen.
        trace: Of the build: a buffer whose value is known stays, and plain attributes without memory move.
    """
    named = named_tensors(model)
    kept = {id(tensor) for name, tensor in named.items() if not chosen(name)}
    kept |= {
        id(tensor)
        for tensor in named.values()
        if trace is not None and not isinstance(tensor, nn.Parameter) and not trace.unknown([tensor])
    }
    moved: dict[int, Tensor] = {}

    def on_meta(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            if isinstance(tensor, nn.Parameter):
                meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            moved[id(tensor)] = meta
            alive.append(tensor)
        return moved[id(tensor)]

    alive: list[Tensor] = []  # while this runs, so that no address is used again
    for _, root in _roots(model):
        for module in root.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) not in kept and tensor.device.type != "meta":
                    setattr(module, name, on_meta(tensor))
    if trace is None:
        return
    for _, module in modules_of(model):
        own = {"_parameters", "_buffers", "_modules"}
        for key, value in list(vars(module).items()):
            if key not in own:
                changed = _replaced(
                    value, lambda tensor: on_meta(tensor) if trace.unknown([tensor]) else tensor
                )
                if changed is not value:
                    vars(module)[key] = changed


def give_memory(model: Any, names: Collection[str]) -> None:
    """Gives those of these tensors that are on `meta` memory; shared ones one, under all of their names."""
    named, wanted = named_tensors(model), set(names)  # while this runs, no address is used again
    chosen = {id(tensor) for name, tensor in named.items() if name in wanted and tensor.is_meta}
    made: dict[int, Tensor] = {}

    def with_memory(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            own = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if is_parameter else own
        return made[id(tensor)]

    for _, root in _roots(model):
        for module in root.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and id(tensor) in chosen:
                    setattr(module, name, with_memory(tensor))


def _replaced(value: Any, change: Callable[[Tensor], Tensor], depth: int = _DEEP) -> Any:
    """`value` with its tensors changed: in lists and dictionaries in place, in tuples by a new tuple."""
    if isinstance(value, Tensor):
        return change(value)
    if depth == 0:
        return value
    if isinstance(value, list):
        for index, item in enumerate(value):
            if (new := _replaced(item, change, depth - 1)) is not item:
                value[index] = new
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            if (new := _replaced(item, change, depth - 1)) is not item:
                value[key] = new
    elif type(value) is tuple:
        items = tuple(_replaced(item, change, depth - 1) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value
