"""The phase `duplicates`: of the records whose hash falls into a part, which fall away. Order-free.

A record falls away if an earlier one, by (unit, row), is the same, whether or not that one stays: so the
answer of a part depends on no other part, nor on who gives it.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.data_set.build_file import BuildStep
from schemas.data_set.step_args import NearDuplicatesArgs
from schemas.data_set.units import UnitResult
from workers.data_builds.min_hash import MinHash, Signatures, band_hashes
from workers.data_builds.stores import UnitStore

Numbers = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 13
_ROWS_AT_ONCE = 1 << 14
_HEAD = struct.Struct("<QQ")


class Hashes(ABC):
    """What tells duplicates, of each record of a unit in order, as a file.

    Args:
        path: Where it goes.
        width: Numbers of a record.
        dtype: Of these numbers.
    """

    def __init__(self, path: Path, width: int, dtype: str) -> None:
        self.path = path
        self._file = path.open("wb", 1 << 20)
        self._file.write(_HEAD.pack(width, np.dtype(dtype).itemsize))

    def add(self, text: str) -> None:
        """Writes those of the next record."""
        self._file.write(self.of(text))

    @abstractmethod
    def of(self, text: str) -> bytes:
        """Those of a text."""

    def close(self) -> None:
        self._file.close()


class ExactHashes(Hashes):
    """128 bits of each text.

    Args:
        path: Where they go.
        seed: Keys the hash.
    """

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__(path, 2, "<u8")
        self._key = seed.to_bytes(8, "little")

    def of(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._key).digest()


class NearHashes(Hashes):
    """The signature of each text, by `MinHash`."""

    def __init__(self, path: Path, seed: int, options: NearDuplicatesArgs) -> None:
        super().__init__(path, options.permutations, "<u4")
        self._min_hash = MinHash(seed, options)

    def of(self, text: str) -> bytes:
        return self._min_hash.signature(text).astype("<u4").tobytes()


def mapped_hashes(path: Path) -> npt.NDArray[Any]:
    """(records, width) numbers of such a file; only what is read is in memory."""
    with path.open("rb") as file:
        width, size = _HEAD.unpack(file.read(_HEAD.size))
    count = (path.stat().st_size - _HEAD.size) // (width * size)
    if not count:
        return np.zeros((0, width), f"<u{size}")
    return np.memmap(path, f"<u{size}", "r", _HEAD.size, (count, width))


def _saved(path: Path, array: npt.NDArray[Any]) -> Path:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    return path


class HashedUnit(NamedTuple):
    """A record unit: its number, and the hashes of its records, mapped."""

    number: int
    hashes: npt.NDArray[Any]


def run_duplicates_unit(
    step: BuildStep, index: int, parts: int, inputs: Sequence[UnitResult], store: UnitStore
) -> UnitResult:
    """Finds the duplicates of one part.

    Args:
        step: The build's step on duplicates.
        index: The part.
        parts: How many there are.
        inputs: The results of all record units.
        store: Where their hashes are.
    """
    units = [
        HashedUnit(each.index, mapped_hashes(store.open(each.outputs["hashes"])))
        for each in sorted(inputs, key=lambda each: each.index)
        if each.phase == "records"
    ]
    options = step.options
    if isinstance(options, NearDuplicatesArgs):
        found, looked_at = _near(units, options, index, parts)
    else:
        found, looked_at = _exact(units, index, parts)
    with TemporaryDirectory(prefix="unit-") as folder:
        dropped = store.write(_saved(Path(folder, "dropped"), _places(units, found)))
    return UnitResult(
        phase="duplicates",
        index=index,
        outputs={"dropped": dropped},
        rows_in=looked_at,
        kept={"records": looked_at - len(found)},
        dropped={step.called: len(found)} if len(found) else {},
    )


def _places(units: Sequence[HashedUnit], records: Rows) -> npt.NDArray[np.int64]:
    """(records, 2): unit and row of each of these numbers, which count on from unit to unit."""
    ends = np.cumsum([len(unit.hashes) for unit in units], dtype=np.int64)
    unit = np.searchsorted(ends, records, side="right")
    sizes = np.array([len(unit.hashes) for unit in units], np.int64)
    numbers = np.array([unit.number for unit in units], np.int64)
    if not len(units):
        return np.zeros((0, 2), np.int64)
    return np.stack([numbers[unit], records - (ends - sizes)[unit]], axis=1).astype("<i8")


def _exact(units: Sequence[HashedUnit], index: int, parts: int) -> tuple[Rows, int]:
    """Numbers of the records that fall away, and how many were looked at."""
    firsts, seconds, records = _of_part(units, lambda hashes: (hashes[:, 0], hashes[:, 1]), index, parts)
    order = np.lexsort((seconds, firsts))  # stable: of equal ones, the earlier record first
    firsts, seconds, records = firsts[order], seconds[order], records[order]
    same = (firsts[1:] == firsts[:-1]) & (seconds[1:] == seconds[:-1])
    return np.sort(records[1:][same]), len(records)


def _near(
    units: Sequence[HashedUnit], options: NearDuplicatesArgs, index: int, parts: int
) -> tuple[Rows, int]:
    def banded(signatures: Numbers) -> tuple[Numbers]:
        return (band_hashes(signatures, options.bands).reshape(-1),)

    hashes, records = _of_part(units, banded, index, parts, options.bands)
    order = np.argsort(hashes, kind="stable")
    hashes, records = hashes[order], records[order]
    first_of = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]][: len(hashes)])
    sizes = np.diff(np.r_[first_of, len(hashes)])
    del hashes, order
    signatures = _AllSignatures(units)
    agreeing = options.threshold * options.permutations - 1e-9
    gone: set[int] = set()

    def similar(left: Rows, right: Rows) -> npt.NDArray[np.bool_]:
        agree = (signatures[left] == signatures[right]).sum(axis=1)
        return np.asarray(agree >= agreeing)

    # most duplicates are like the first of their bucket: all buckets at once
    starts = np.repeat(first_of, sizes)
    later = np.flatnonzero(np.arange(len(records)) != starts)
    for at in range(0, len(later), _PAIRS_AT_ONCE):
        some = later[at : at + _PAIRS_AT_ONCE]
        hit = similar(records[starts[some]], records[some])
        gone.update(records[some[hit]].tolist())
    for first, size in zip(first_of[sizes > 2].tolist(), sizes[sizes > 2].tolist(), strict=True):
        for place in range(first + 2, first + size):
            if int(records[place]) in gone:
                continue
            if _like_one_of(records[first + 1 : place], int(records[place]), similar):
                gone.add(int(records[place]))
    return np.array(sorted(gone), np.int64), len(np.unique(records))


def _like_one_of(earlier: Rows, record: int, similar: Any) -> bool:
    for at in range(0, len(earlier), _PAIRS_AT_ONCE):
        some = earlier[at : at + _PAIRS_AT_ONCE]
        if similar(some, np.full(len(some), record)).any():
            return True
    return False


class _AllSignatures:
    """Signatures of all units by the records' numbers; only those that are asked for are in memory."""

    def __init__(self, units: Sequence[HashedUnit]) -> None:
        self._units = [unit.hashes for unit in units]
        self._ends = np.cumsum([len(hashes) for hashes in self._units], dtype=np.int64)

    def __getitem__(self, records: Rows) -> Signatures:
        unit = np.searchsorted(self._ends, records, side="right")
        found = np.empty((len(records), self._units[0].shape[1]), np.uint32)
        for number in np.unique(unit).tolist():
            mine = unit == number
            hashes = self._units[number]
            found[mine] = hashes[records[mine] - (self._ends[number] - len(hashes))]
        return found


def _pieces(units: Sequence[HashedUnit]) -> Iterator[npt.NDArray[Any]]:
    for unit in units:
        for first in range(0, len(unit.hashes), _ROWS_AT_ONCE):
            yield np.asarray(unit.hashes[first : first + _ROWS_AT_ONCE])


def _of_part(
    units: Sequence[HashedUnit],
    hashed: Callable[[Numbers], tuple[Numbers, ...]],
    index: int,
    parts: int,
    each: int = 1,
) -> list[Any]:
    """The hashes of this part, by what `hashed` makes of the stored ones, and their records' numbers.

    Args:
        units: All of them.
        hashed: Stored hashes of some records → (hashes,) arrays, of which the first decides the part.
        index: The part.
        parts: How many there are.
        each: Hashes of one record.
    """
    found: list[tuple[Numbers, ...]] = []
    before = 0
    for stored in _pieces(units):
        arrays = hashed(stored)
        mine = np.flatnonzero(arrays[0] % np.uint64(parts) == index)
        found.append((*(array[mine] for array in arrays), before + mine // each))
        before += len(stored)
    if not found:
        return [np.zeros(0, np.uint64)] * len(hashed(np.zeros((0, 2), np.uint64))) + [np.zeros(0, np.int64)]
    return [np.concatenate(column) for column in zip(*found, strict=True)]
