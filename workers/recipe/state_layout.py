"""Optimizer state of any shape as JSON with tensors beside it, and back. Pure.

A state is a tree: maps with texts or whole numbers as keys, lists, tuples, tensors, numbers, texts, None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import BadModel, Conflict

State = dict[str, Any]
"""A parameter's optimizer state."""

_DEEPEST = 32


def encoded(value: Any, keep: Callable[[str, Tensor], int | str], path: str = "") -> Any:
    """The tree as JSON values; `keep` stores a tensor under its path, and returns how to find it.

    Raises:
        BadModel: Something in it is none of the kinds above.
    """
    if path.count(".") > _DEEPEST:
        raise BadModel(f"the optimizer's state is nested more than {_DEEPEST} deep at {path[:80]}")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return {"tensor": keep(path, value), "host": value.device.type == "cpu"}
        case dict():
            pairs = []
            for key, inner in value.items():
                if not isinstance(key, str | int) or isinstance(key, bool):
                    raise BadModel(f"the optimizer keeps state under {key!r}, which is no text and no number")
                pairs.append([key, encoded(inner, keep, f"{path}.{key}" if path else str(key))])
            return {"map": pairs}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {
                kind: [
                    encoded(inner, keep, f"{path}.{at}" if path else str(at))
                    for at, inner in enumerate(value)
                ]
            }
    raise BadModel(
        f"the optimizer keeps a {type(value).__name__} in its state ({path}), which can't be sent to "
        "another instance; keep tensors and numbers there"
    )


def decoded(body: Any, tensor: Callable[[int | str, bool], Tensor], depth: int = 0) -> Any:
    """The tree of `encoded`; `tensor` finds a tensor again, given whether it belongs on the host.

    Raises:
        Conflict: It is not what `encoded` gives.
    """
    if depth > _DEEPEST + 2:
        raise Conflict("the optimizer state that came is nested too deep")
    if not isinstance(body, Mapping):
        if body is None or isinstance(body, bool | int | float | str):
            return body
        raise Conflict(f"the optimizer state that came has a {type(body).__name__} in it")
    match dict(body):
        case {"tensor": int() | str() as key, "host": bool() as host}:
            return tensor(key, host)
        case {"map": list() as pairs}:
            return {key: decoded(inner, tensor, depth + 1) for key, inner in pairs}
        case {"list": list() as items}:
            return [decoded(inner, tensor, depth + 1) for inner in items]
        case {"tuple": list() as items}:
            return tuple(decoded(inner, tensor, depth + 1) for inner in items)
    raise Conflict("the optimizer state that came has an unknown form")


def to_tensor(body: Any) -> Tensor:
    """JSON values as a (bytes,) uint8 tensor."""
    data = json.dumps(body, separators=(",", ":")).encode()
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def from_tensor(tensor: Tensor) -> Any:
    """The values of `to_tensor`.

    Raises:
        Conflict: It holds something else.
    """
    try:
        return json.loads(tensor.cpu().numpy().tobytes())
    except (ValueError, TypeError, RecursionError):
        raise Conflict("the description of the optimizer state that came can't be read") from None


def size_of(value: Any) -> int:
    """Bytes of all tensors in a state."""
    total = 0

    def count(path: str, tensor: Tensor) -> int:
        nonlocal total
        total += tensor.nbytes
        return 0

    encoded(value, count)
    return total


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(_bits(one), _bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
