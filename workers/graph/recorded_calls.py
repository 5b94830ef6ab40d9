"""Recorded calls, and the layers that they make: each with the trained weights of one module."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from workers.graph.model_graph import Call, GraphLayer, called_name


@dataclass(eq=False)
class RecordedCall:
    """A call as it was recorded, with the module that it belongs to, if it is one."""

    call: Call
    module: nn.Module | None
    weights: dict[str, Tensor]
    changed: tuple[int, ...]  # storages that it changed in place
    touched: tuple[int, ...]  # storages of its arguments and results


def named_layers(grouped: list[list[RecordedCall]]) -> tuple[GraphLayer, ...]:
    layers: list[GraphLayer] = []
    used: dict[str, int] = {}
    for index, members in enumerate(grouped):
        main = next((item for item in members if trains(item)), None) or next(
            (item for item in members if item.module is not None), None
        )
        if main is not None and isinstance(main.call.target, str):
            name, kind = main.call.target, type(main.module).__name__
        elif main is not None:
            name, kind = next(iter(main.weights)), called_name(main.call.target)
        else:
            name, kind = f"function_{index}", called_name(members[0].call.target)
        used[name] = used.get(name, 0) + 1
        layers.append(
            GraphLayer(
                name=name if used[name] == 1 else f"{name}#{used[name]}",
                kind=kind,
                calls=tuple(item.call for item in members),
                modules=tuple(
                    dict.fromkeys(item.call.target for item in members if isinstance(item.call.target, str))
                ),
                weights=tuple(dict.fromkeys(name for item in members for name in item.weights)),
            )
        )
    return tuple(layers)


def joined(grouped: list[list[RecordedCall]]) -> set[tuple[int, int]]:
    """From the layer that first touches a storage to the last that changes it: they must be one layer."""
    first: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for index, members in enumerate(grouped):
        for item in members:
            for storage in item.touched:
                first.setdefault(storage, index)
            for storage in item.changed:
                if first[storage] < index:
                    found[storage] = (first[storage], index)
    return set(found.values())


def merged(layers: Sequence[GraphLayer], pairs: Collection[tuple[int, int]]) -> tuple[GraphLayer, ...]:
    """The layers, with the first and the last of each pair and all between them as one layer."""
    made: list[GraphLayer] = []
    for index, layer in enumerate(layers):
        if any(first < index <= last for first, last in pairs):
            before = made.pop()
            layer = replace(
                before,
                calls=before.calls + layer.calls,
                modules=tuple(dict.fromkeys(before.modules + layer.modules)),
                weights=tuple(dict.fromkeys(before.weights + layer.weights)),
            )
        made.append(layer)
    return tuple(made)


def trains(recorded: RecordedCall) -> bool:
    module = recorded.module
    if module is not None and next(module.parameters(), None) is not None:
        return True
    return any(isinstance(weight, nn.Parameter) for weight in recorded.weights.values())
