"""Values in a graph's calls: references to wires and weights inside of arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Wire:
    """Stands for the value of a wire: a tensor, or a size."""

    name: str


@dataclass(frozen=True, slots=True)
class Weight:
    """Stands for a parameter or buffer of the model, by its full name."""

    name: str


class TensorShape(tuple[int, ...]):
    """The shape of a tensor whose sizes are followed."""

    def numel(self) -> int:
        total = 1
        for size in self:
            total = size * total
        return total


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every leaf changed: in tuples, lists, dictionaries, slices and others."""
    if isinstance(value, slice):
        return slice(*(replaced(item, change) for item in (value.start, value.stop, value.step)))
    if type(value) in (tuple, list, TensorShape):
        items = [replaced(item, change) for item in value]
        return items if type(value) is list else tuple(items)
    if type(value) is dict:
        return {key: replaced(item, change) for key, item in value.items()}
    if _is_structure(value):
        leaves, spec = pytree.tree_flatten(value)
        return pytree.tree_unflatten([replaced(leaf, change) for leaf in leaves], spec)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a structure, in the order of `replaced`."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if type(value) in (tuple, list, TensorShape):
        for item in value:
            yield from leaves(item)
    elif type(value) is dict:
        for item in value.values():
            yield from leaves(item)
    elif _is_structure(value):
        for leaf in pytree.tree_flatten(value)[0]:
            yield from leaves(leaf)
    else:
        yield value


def _is_structure(value: Any) -> bool:
    return not isinstance(value, Tensor) and (
        type(value) in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value)
    )


def named_wires(value: Any) -> list[str]:
    """The names of the wires in a structure, each once, in order."""
    return list(dict.fromkeys(leaf.name for leaf in leaves(value) if isinstance(leaf, Wire)))
