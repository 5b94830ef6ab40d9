"""Random access to what can only be read in its own order: it is read once, and written down (ADR-0046).

That is the price of an iterable: its whole content on the disk of each data instance before the first step,
and the time that reading it takes. In return a sample's place is a number, and nothing is lost or doubled.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import shutil
import time
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bus.logs import get_logger
from schemas.errors import BadData

log = get_logger("data")

LEAST_FREE = 0.05
"""Part of the disk that a spool leaves free."""

_LOOK_EVERY = 256


class Spool:
    """Items on disk, by number.

    Attributes:
        digest: SHA-256 of the items.
    """

    def __init__(self, path: Path, ends: array[int], digest: str) -> None:
        self._file = path.open("rb")
        self._ends = ends
        self.digest = digest

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Any:
        first = self._ends[index - 1] if index else 0
        self._file.seek(first)
        return pickle.loads(self._file.read(self._ends[index] - first))

    def close(self) -> None:
        self._file.close()


def spooled(items: Iterable[Any], folder: Path, *, limit: int | None, what: str) -> Spool:
    """Writes items down, in their order.

    Args:
        items: Read once.
        folder: Where the file goes.
        limit: Items at most; None: all.
        what: Names them in texts: `data.factory mine:stream`.

    Raises:
        BadData: An item can't be written, or they fill the disk.
    """
    began = time.perf_counter()
    path, ends, digest, size = folder / "spool", array("q"), hashlib.sha256(), 0
    with path.open("wb") as file:
        for number, item in enumerate(items):
            if number == limit:
                break
            if not number % _LOOK_EVERY and _is_full(folder):
                raise BadData(
                    f"{what} has filled this node's disk after {number:,} samples and {size:,} bytes; "
                    "say how many to take: data.limit"
                )
            try:
                content = written(item)
            except Exception as error:  # users' objects may raise anything
                raise BadData(f"{what}: sample {number:,} can't be written down: {error}") from error
            file.write(content)
            digest.update(content)
            size += len(content)
            ends.append(size)
    log.info(
        f"{what} can only be read in its own order: each data instance has read it once and written it down",
        samples=len(ends),
        bytes=size,
        seconds=round(time.perf_counter() - began, 1),
    )
    return Spool(path, ends, digest.hexdigest())


class _Pickler(pickle.Pickler):
    """Writes tensors as their bytes: torch's own form differs from process to process, and is longer."""

    def reducer_override(self, item: Any) -> Any:
        if type(item) is not torch.Tensor or item.layout is not torch.strided or item.device.type != "cpu":
            return NotImplemented
        flat = item.detach().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), str(item.dtype), tuple(item.shape))


def _tensor(content: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = getattr(torch, dtype.removeprefix("torch."))
    return torch.frombuffer(content, dtype=kind).reshape(shape) if content else torch.empty(shape, dtype=kind)


def written(item: Any) -> bytes:
    """An item as bytes, the same in each process."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(item)
    return buffer.getvalue()


def _is_full(folder: Path) -> bool:
    usage = shutil.disk_usage(folder)
    return usage.free < LEAST_FREE * usage.total
