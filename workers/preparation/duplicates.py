"""The phase `duplicates`: of the records whose hash falls into a part, which fall away. Order-free.

A record falls away if an earlier one, by (unit, row), is the same, whether or not that one stays: so the
answer of a part depends on no other part, nor on who gives it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.data_set.step_args import NearDuplicatesArgs, StepArgs
from schemas.data_set.units import UnitResult
from workers.preparation.min_hash import MinHash, Signatures, band_hashes
from workers.preparation.stores import UnitStore

Entries = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 13
_ROWS_AT_ONCE = 1 << 14
_ENTRY = np.dtype([("hash", "<u8"), ("more", "<u8"), ("record", "<i8")])


class ExactHashes:
    """128 bits of each text.

    Args:
        seed: Keys the hash.
    """

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(8, "little")
        self._found = bytearray()

    def add(self, text: str) -> None:
        self._found += hashlib.blake2b(text.encode(), digest_size=16, key=self._key).digest()

    def save(self, path: Path) -> Path:
        """(records, 2) uint64, as NumPy writes it."""
        return _saved(path, np.frombuffer(bytes(self._found), "<u8").reshape(-1, 2))


class NearHashes:
    """The signature of each text, by `MinHash`."""

    def __init__(self, seed: int, options: NearDuplicatesArgs) -> None:
        self._min_hash = MinHash(seed, options)
        self._found: list[bytes] = []

    def add(self, text: str) -> None:
        self._found.append(self._min_hash.signature(text).astype("<u4").tobytes())

    def save(self, path: Path) -> Path:
        """(records, permutations) uint32, as NumPy writes it."""
        width = self._min_hash.permutations
        return _saved(path, np.frombuffer(b"".join(self._found), "<u4").reshape(-1, width))


def _saved(path: Path, array: npt.NDArray[Any]) -> Path:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    return path


class HashedUnit(NamedTuple):
    """A record unit: its number, and the hashes of its records, mapped."""

    number: int
    hashes: npt.NDArray[Any]


def run_duplicates_unit(
    options: StepArgs, index: int, parts: int, inputs: Sequence[UnitResult], store: UnitStore
) -> UnitResult:
    """Finds the duplicates of one part.

    Args:
        options: The arguments of the build's step.
        index: The part.
        parts: How many there are.
        inputs: The results of all record units.
        store: Where their hashes are.
    """
    units = [
        HashedUnit(each.index, np.load(store.open(each.outputs["hashes"]), mmap_mode="r", allow_pickle=False))
        for each in sorted(inputs, key=lambda each: each.index)
        if each.phase == "records"
    ]
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
        dropped={"duplicates": len(found)} if len(found) else {},
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
    entries = _entries(((hashes[:, 0], hashes[:, 1]) for hashes in _pieces(units)), index, parts)
    same = (entries["hash"][1:] == entries["hash"][:-1]) & (entries["more"][1:] == entries["more"][:-1])
    return np.sort(entries["record"][1:][same]), len(entries)


def _near(
    units: Sequence[HashedUnit], options: NearDuplicatesArgs, index: int, parts: int
) -> tuple[Rows, int]:
    def banded() -> Iterator[tuple[Entries, Entries]]:
        for signatures in _pieces(units):
            found = band_hashes(signatures, options.bands)
            yield found.reshape(-1), np.tile(np.arange(options.bands, dtype=np.uint64), len(found))

    entries = _entries(banded(), index, parts, options.bands)
    records: Rows = entries["record"]
    first_of = np.flatnonzero(np.r_[True, entries["hash"][1:] != entries["hash"][:-1]][: len(entries)])
    sizes = np.diff(np.r_[first_of, len(entries)])
    signatures = _AllSignatures(units)
    agreeing = options.threshold * options.permutations - 1e-9
    gone: set[int] = set()

    def similar(left: Rows, right: Rows) -> npt.NDArray[np.bool_]:
        agree = (signatures[left] == signatures[right]).sum(axis=1)
        return np.asarray(agree >= agreeing)

    # most duplicates are like the first of their bucket: all buckets at once
    starts = np.repeat(first_of, sizes)
    later = np.flatnonzero(np.arange(len(entries)) != starts)
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


def _entries(hashes: Iterator[tuple[Entries, Entries]], index: int, parts: int, each: int = 1) -> Entries:
    """Those of this part, in order of hash, then record; `each` hashes belong to one record."""
    found: list[Entries] = []
    before = 0
    for values, more in hashes:
        mine = np.flatnonzero(values % np.uint64(parts) == index)
        some = np.empty(len(mine), _ENTRY)
        some["hash"], some["more"] = values[mine], more[mine]
        some["record"] = before + mine // each
        before += len(values) // each
        found.append(some)
    entries: Entries = np.concatenate(found or [np.empty(0, _ENTRY)])
    return entries[np.lexsort((entries["record"], entries["more"], entries["hash"]))]
