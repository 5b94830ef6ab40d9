"""Makes one batch of some samples: stacked by torch's rules, or by the user's `data.collate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import BadData, DmscError
from workers.data.batches import Batch
from workers.user_code import describe, load

DEFAULT_NAMES = ("inputs", "targets")
"""Names of the parts of a sample that is a tuple, if the job gives none."""

Collate = Callable[[Sequence[Any]], Batch]


def stack(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Stacks samples name by name, with the types that `torch.utils.data.default_collate` gives.

    Python's floats become float64, its ints and bools int64 and bool, numpy's arrays and numbers keep theirs.

    Raises:
        BadData: Names, types or shapes differ between samples, or a value makes no tensor.
    """
    first = samples[0]
    for sample in samples:
        if sample.keys() != first.keys():
            raise BadData(
                f"data: samples differ in their names: {', '.join(first)} and {', '.join(sample)}; "
                "give each the same, or data.collate"
            )
    return {name: _stacked(name, [sample[name] for sample in samples]) for name in first}


def _stacked(name: str, values: list[Any]) -> Tensor:
    tensors = [as_tensor(name, value) for value in values]
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape != first.shape:
            raise BadData(
                f"data: shapes differ between samples: {name} is {_described(first)} and "
                f"{_described(tensor)}; give data.collate, which may pad them, or make them equal"
            )
        if tensor.dtype != first.dtype:
            raise BadData(
                f"data: types differ between samples: {name} is {_described(first)} and "
                f"{_described(tensor)}; say data.dtypes: {{{name}: …}}, or give data.collate"
            )
    return torch.stack(tensors)


def as_tensor(name: str, value: Any) -> Tensor:
    """One value of a sample as a tensor.

    Raises:
        BadData: It makes none.
    """
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if isinstance(value, bool | int | float):
        kind = torch.float64 if isinstance(value, float) else None
        try:
            return torch.tensor(value, dtype=kind)
        except (RuntimeError, OverflowError):
            raise BadData(f"data: {name} is {value}, which 64 bits do not hold") from None
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        # torch warns of arrays that are read only, such as those that a shard's bytes hold
        return torch.from_numpy(np.require(value, requirements=("C", "W")))
    if isinstance(value, list | tuple) and value:
        try:
            value = np.asarray(value)
        except ValueError:
            raise BadData(
                f"data: {name} of a sample has lists of different lengths; make them equal, or give "
                "data.collate"
            ) from None
        if value.dtype.kind in "biuf":
            return torch.from_numpy(value)
    kind_of = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    raise BadData(
        f"data: {name} of a sample is {kind_of}, which makes no tensor; leave it out, turn it into numbers "
        "by data.transform, or give data.collate"
    )


def users_collate(name: str, names: Sequence[str] = ()) -> Collate:
    """The user's function from a list of samples to a batch: a mapping of tensors, or a tuple of them.

    Args:
        name: `module:callable`.
        names: What the parts of a tuple are called.

    Raises:
        BadModel: It can't be loaded.
    """
    function = load(name)

    def collate(samples: Sequence[Any]) -> Batch:
        try:
            made = function(list(samples))
        except DmscError:
            raise
        except Exception as error:  # user code may raise anything
            raise BadData(f"data.collate {name} failed: {describe(error)}") from error
        found = named(made, names, f"data.collate {name}")
        for each, tensor in found.items():
            if not isinstance(tensor, Tensor) or not tensor.ndim or tensor.shape[0] != len(samples):
                kind = _described(tensor) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
                raise BadData(
                    f"data.collate {name} returned {kind} as {each}; each is a tensor whose first dimension "
                    f"is the number of samples, here {len(samples)}"
                )
        return {each: tensor.detach().contiguous() for each, tensor in found.items()}

    return collate


def named(value: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """A mapping as it is, or the parts of a tuple under their names.

    Raises:
        BadData: There are more or fewer parts than names.
    """
    if isinstance(value, Mapping):
        return dict(value)
    parts = value if isinstance(value, tuple | list) else (value,)
    chosen = tuple(names) or DEFAULT_NAMES[: len(parts)]
    if len(chosen) != len(parts):
        raise BadData(
            f"{what} returned {len(parts)} parts for {len(chosen)} names ({', '.join(chosen)}); "
            "say data.names: a list with one name for each part"
        )
    return dict(zip(chosen, parts, strict=True))


def _described(tensor: Tensor) -> str:
    return f"[{','.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"
