"""MinHash: signatures that agree in as many places as their texts share runs of words (Broder 1997)."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.data_set.step_args import NearDuplicatesArgs

Signatures = npt.NDArray[np.uint32]
"""(records, permutations)."""
Words64 = npt.NDArray[np.uint64]

_RUNS_AT_ONCE = 1 << 10
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class MinHash:
    """Makes signatures.

    Args:
        seed: Of the permutations, which are the same for all units of a build.
        options: How many, over runs of how many words.
    """

    def __init__(self, seed: int, options: NearDuplicatesArgs) -> None:
        self._words = options.words
        self.permutations = options.permutations
        drawn = hashlib.shake_256(f"minhash/{seed}".encode()).digest(16 * options.permutations)
        numbers = np.frombuffer(drawn, dtype="<u8").reshape(2, -1)
        self._factors: Words64 = numbers[0] | np.uint64(1)
        self._shifts: Words64 = numbers[1]

    def signature(self, text: str) -> npt.NDArray[np.uint32]:
        """(permutations,): the least value under each; of a text without words, the largest number."""
        runs = self._runs(text)
        least = np.full(self.permutations, np.iinfo(np.uint64).max, np.uint64)
        for first in range(0, len(runs), _RUNS_AT_ONCE):
            values = runs[first : first + _RUNS_AT_ONCE, None] * self._factors + self._shifts
            np.minimum(least, values.min(axis=0), out=least)
        return (least >> np.uint64(32)).astype(np.uint32)

    def _runs(self, text: str) -> Words64:
        """The hashes of the text's runs of words, each once; of a shorter text, of all its words."""
        words = text.casefold().encode("utf-8", "replace").split()
        hashes: Words64 = np.fromiter(map(zlib.crc32, words), np.uint64, len(words))
        width = min(self._words, len(hashes))
        if not width:
            return hashes
        runs: Words64 = np.zeros(len(hashes) - width + 1, np.uint64)
        for offset in range(width):
            runs = runs * _BASE + hashes[offset : offset + len(runs)]
        return np.unique(mixed(runs))


def mixed(values: Words64) -> Words64:
    """Each number as another one whose bits all depend on all of its bits (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def band_hashes(signatures: Signatures, bands: int) -> Words64:
    """(records, bands): what two records have in common if they have all values of a band in common."""
    height = signatures.shape[1] // bands
    parts: npt.NDArray[Any] = signatures.astype(np.uint64).reshape(len(signatures), bands, height)
    found: Words64 = np.broadcast_to(np.arange(bands, dtype=np.uint64), parts.shape[:2]).copy()
    for row in range(height):
        found = mixed(found * _BASE + parts[:, :, row])
    return found
