"""The chain of a job: its functions in order, each sample under its own seed, and the batch at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from schemas.job import JobSpec
from schemas.registry import TensorSchema
from workers.data.batches import Batch, Split
from workers.data.checking import check_shapes
from workers.data.collating import Collate, stack, users_collate
from workers.data.permutation import key_number
from workers.data.preprocessing.functions import SampleFunction, open_function
from workers.data.preprocessing.records import Sample


class ChainLink:
    """One function of the chain.

    Args:
        spec: The job.
        number: Its place in `data.preprocess`.
        fetched: `bus://` URL → file.

    Raises:
        See `open_function`.
    """

    def __init__(self, spec: JobSpec, number: int, fetched: Mapping[str, Path] = {}) -> None:
        entry = spec.data.preprocess[number]
        self.name = entry.name
        self._seed = spec.training.seed
        self._function: SampleFunction = open_function(entry, f"data.preprocess[{number}]", fetched)

    def apply(self, samples: Sequence[Sample], split: Split, step: int, microbatch: int) -> list[Sample]:
        """What it makes of the samples of a microbatch: a pure function of them and of these numbers.

        Raises:
            BadData: It fails, or makes no sample.
            OSError: A file can't be read now.
        """
        trains = split == "train"
        place = (step, microbatch) if trains else (split, microbatch)
        return [
            self._function(sample, key_number(self._seed, *place, number, "preprocess", self.name), trains)
            for number, sample in enumerate(samples)
        ]


class BatchMaking:
    """The end of the chain: `data.collate`, or samples stacked."""

    def __init__(self, spec: JobSpec) -> None:
        data = spec.data
        names = data.names if isinstance(data.names, tuple) else ()
        self._largest = data.largest
        self._collate: Collate = stack if data.collate is None else users_collate(data.collate, names)

    def batch(self, samples: Sequence[Sample]) -> Batch:
        """The batch of a microbatch's samples.

        Raises:
            BadData: They make none, or a larger one than memory was measured for.
        """
        batch = self._collate(samples)
        check_shapes(batch, self._largest)
        return batch


def sample_schema(sample: Sample) -> tuple[TensorSchema, ...]:
    """Names, shapes and types of a sample's values."""
    return tuple(TensorSchema(name=str(name), **_kind(value)) for name, value in sample.items())


def _kind(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"shape": tuple(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, np.ndarray | np.generic):
        return {"shape": tuple(value.shape), "dtype": str(value.dtype)}
    kinds = {bool: "bool", int: "int64", float: "float64", str: "text", bytes: "bytes"}
    if type(value) in kinds:
        return {"shape": (), "dtype": kinds[type(value)]}
    return {"shape": (), "dtype": "mapping" if isinstance(value, Mapping) else "list"}
