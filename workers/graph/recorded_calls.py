"""Recorded calls, and the layers that they make: each with the trained weights of one module."""

from __future__ import annotations

from dataclasses import dataclass

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


def joined(grouped: list[list[RecordedCall]]) -> tuple[tuple[int, int], ...]:
    """From the layer that first touches a storage to the last that changes it: no cut may come between."""
    first: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for index, members in enumerate(grouped):
        for item in members:
            for storage in item.touched:
                first.setdefault(storage, index)
            for storage in item.changed:
                if first[storage] < index:
                    found[storage] = (first[storage], index)
    return tuple(sorted(set(found.values())))


def trains(recorded: RecordedCall) -> bool:
    module = recorded.module
    if module is not None and next(module.parameters(), None) is not None:
        return True
    return any(isinstance(weight, nn.Parameter) for weight in recorded.weights.values())
