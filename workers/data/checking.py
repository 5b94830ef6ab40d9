"""What is tried of a job's data when it is submitted: one batch of each split, decoded, twice."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch

from bus.logs import get_logger
from schemas.errors import BadData
from workers.data.batches import Batch, BatchSource, Split

log = get_logger("data")


def checked_batch(source: BatchSource, evaluation_sets: Iterable[Split] = ()) -> Batch:
    """The first batch for training, after the first one of each split was tried.

    Raises:
        BadData: It can't be made, its second reading gives something else, or an evaluation set has other
            names or types.
    """
    first = source.batch("train", 0, 0)
    for name, tensor in source.batch("train", 0, 0).items():
        if not torch.equal(*(_bits(each) for each in (tensor, first[name]))):
            raise BadData(
                f"data: {name} of the same samples differs when they are read again, so a lost instance "
                "could not be replaced; draw randomness from torch, numpy or random, which are seeded for "
                "each sample"
            )
    log.info("data", batch=describe_batch(first), digest=source.digest[:12], tokens=source.tokens)
    for split in evaluation_sets:
        held = source.batch(split, 0, 0)
        ours, theirs = ({name: tensor.dtype for name, tensor in batch.items()} for batch in (first, held))
        if ours != theirs:
            raise BadData(
                f"data: evaluation set {split} has {describe_batch(held)}, and training "
                f"{describe_batch(first)}; "
                "give both the same names and types"
            )
    return first


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def check_shapes(batch: Batch, largest: Mapping[str, Sequence[int]]) -> None:
    """Refuses a batch that is larger than memory was measured for.

    Args:
        batch: What was made.
        largest: The section's `data.largest`.

    Raises:
        BadData: A name is not in the batch, or a tensor has other dimensions or a larger one.
    """
    for name, sizes in largest.items():
        if name not in batch:
            raise BadData(f"data.largest: there is no {name} in a batch; there are {', '.join(batch)}")
        shape = batch[name].shape[1:]
        if len(shape) != len(sizes) or any(map(operator.gt, shape, sizes)):
            raise BadData(
                f"data: {name} of a microbatch is {list(shape)} for each sample, and data.largest says "
                f"{list(sizes)}; collate to at most that, or say more"
            )


def largest_batch(batch: Batch, largest: Mapping[str, Sequence[int]]) -> Batch:
    """The batch with its own values repeated up to the largest shape of each name: what has to have room."""
    return {name: _repeated(tensor, largest.get(name, tensor.shape[1:])) for name, tensor in batch.items()}


def _repeated(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    for dimension, size in enumerate(sizes, 1):
        if (here := tensor.shape[dimension]) != size:
            if not here:
                raise BadData("data: the first batch has an empty dimension, so that its memory is unknown")
            tensor = tensor.index_select(dimension, torch.arange(size) % here)
    return tensor


def describe_batch(batch: Batch) -> str:
    """Names, shapes, types and ranges in one line: `inputs [4,128] int64 of 10 to 122`."""
    return "; ".join(
        f"{name} [{','.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"
        + (f" of {tensor.min().item():.4g} to {tensor.max().item():.4g}" if tensor.numel() else "")
        for name, tensor in batch.items()
    )
