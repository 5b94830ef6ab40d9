"""Samples on their way between two instances: one tensor of bytes, from which nothing but values is made.

    8 bytes      size of the description, little-endian
    description  JSON; numbers, texts, booleans and None stand for themselves, all else is a list whose first
                 item says what it is, and names its place behind the description
    values       bytes of arrays and tensors, each at a multiple of 64 behind the description

It is no pickle: an instance runs no code that another one sends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import BadData

Sample = Mapping[str, Any]
"""Name → value, of one sample."""

_ALIGNED = 64
_HEAD = 8
_KINDS = "biufc"
MOST_DEPTH = 32
"""Levels of lists and mappings in a value; one that holds itself has no end."""


def packed(samples: Sequence[Sample], what: str = "data.preprocess") -> Tensor:
    """The samples as one tensor, (bytes,) uint8.

    Raises:
        BadData: A value is of a kind that does not travel.
    """
    parts: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
    size = 0

    def place(raw: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
        nonlocal size
        at = -(-size // _ALIGNED) * _ALIGNED
        if at > size:
            parts.append(np.zeros(at - size, dtype=np.uint8))
        parts.append(raw)
        size = at + raw.size
        return at

    def described(name: str, value: Any, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise BadData(f"{what}: {name} of a sample has more than {MOST_DEPTH} levels of lists")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            raw = (
                plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0, dtype=np.uint8)
            )
            return ["tensor", str(plain.dtype).removeprefix("torch."), list(plain.shape), place(raw)]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
            array = np.ascontiguousarray(value)
            raw = np.frombuffer(array.tobytes(), dtype=np.uint8)
            kind = "array" if isinstance(value, np.ndarray) else "number"
            return [kind, array.dtype.str, list(np.shape(value)), place(raw)]
        if isinstance(value, bytes | bytearray | memoryview):
            raw = np.frombuffer(bytes(value), dtype=np.uint8)
            return ["bytes", raw.size, place(raw)]
        if isinstance(value, Mapping):
            return ["mapping", {str(key): described(name, each, depth + 1) for key, each in value.items()}]
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [described(name, each, depth + 1) for each in value]]
        raise BadData(
            f"{what}: {name} of a sample is a {type(value).__name__}, which does not travel between "
            "instances; make it a number, text, bytes, an array, a tensor, or a list or mapping of them"
        )

    described_samples = [
        {name: described(name, value, 0) for name, value in sample.items()} for sample in samples
    ]
    head = json.dumps(described_samples, ensure_ascii=False).encode("utf-8", "surrogatepass")
    behind = -(-(_HEAD + len(head)) // _ALIGNED) * _ALIGNED
    whole = np.zeros(behind + size, dtype=np.uint8)
    whole[:_HEAD] = np.frombuffer(len(head).to_bytes(_HEAD, "little"), dtype=np.uint8)
    whole[_HEAD : _HEAD + len(head)] = np.frombuffer(head, dtype=np.uint8)
    at = behind
    for part in parts:
        whole[at : at + part.size] = part
        at += part.size
    return torch.from_numpy(whole)


def unpacked(record: Tensor) -> list[dict[str, Any]]:
    """The samples of such a tensor. Arrays and tensors share its memory.

    Raises:
        BadData: It is none.
    """
    whole = record.numpy()
    try:
        size = int.from_bytes(whole[:_HEAD].tobytes(), "little")
        head = json.loads(whole[_HEAD : _HEAD + size].tobytes().decode("utf-8", "surrogatepass"))
        values = whole[-(-(_HEAD + size) // _ALIGNED) * _ALIGNED :]
        return [{name: _value(each, values) for name, each in sample.items()} for sample in head]
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RuntimeError,
        RecursionError,
    ) as error:
        raise BadData(f"a record of samples is damaged: {error}") from None


def _value(described: Any, values: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
    if not isinstance(described, list):
        return described
    kind = described[0]
    if kind == "mapping":
        return {key: _value(each, values) for key, each in described[1].items()}
    if kind in ("list", "tuple"):
        found = [_value(each, values) for each in described[1]]
        return found if kind == "list" else tuple(found)
    if kind == "bytes":
        return values[described[2] : described[2] + described[1]].tobytes()
    _, dtype, shape, at = described
    if kind == "tensor":
        of = getattr(torch, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * of.itemsize
        return torch.from_numpy(values[at : at + size]).view(of).reshape(shape)
    array = np.frombuffer(values[at:], dtype=np.dtype(dtype), count=int(np.prod(shape, dtype=np.int64)))
    return array.reshape(shape) if kind == "array" else array[0]
