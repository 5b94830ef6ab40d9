"""Sizes of tensors that are followed while a model is recorded, instead of frozen."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from workers.graph.values import Wire


class SizeRecorder(Protocol):
    """Writes down numbers that follow from sizes."""

    def sized(self, function: Callable[..., int], args: tuple[Any, ...], value: Any) -> Any:
        """The number `value` as a `Size`, if it is one."""


class Size(int):
    """A size of a tensor, or a number computed from sizes; its wire says which."""

    wire: Wire
    recorder: SizeRecorder

    @classmethod
    def of(cls, value: int, wire: Wire, recorder: SizeRecorder) -> Size:
        size = cls(value)
        size.wire, size.recorder = wire, recorder
        return size

    __hash__ = int.__hash__


def _arithmetic(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)
    plain = getattr(int, f"__{name}__")
    swapped = getattr(int, f"__r{name}__", None)

    def forward(self: Size, *others: Any) -> Any:
        value = plain(self, *others)
        return value if value is NotImplemented else self.recorder.sized(function, (self, *others), value)

    def backward(self: Size, other: Any) -> Any:
        assert swapped is not None
        value = swapped(self, other)
        return value if value is NotImplemented else self.recorder.sized(function, (other, self), value)

    setattr(Size, f"__{name}__", forward)
    if swapped is not None:
        setattr(Size, f"__r{name}__", backward)
    return forward


for _name in ("add", "sub", "mul", "floordiv", "mod", "neg"):
    _arithmetic(_name)


def size_of(tensor: Tensor, dim: int) -> int:
    return tensor.size(dim)
