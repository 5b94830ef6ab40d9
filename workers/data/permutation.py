"""A keyed permutation of 0 … size-1: nothing is stored, any index can be asked for alone, in any order.

A Feistel network over the smallest power of two that holds `size`; what it maps beyond `size` it maps again
until it lies within (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). At most two passes
are needed on average.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]

HALF_ROUNDS = 8
"""Each mixes one half into the other. Four are enough in theory; small domains mix worse: twice that."""

SMALL = 1024
LARGEST = 1 << 62


def keys(*parts: object, count: int = HALF_ROUNDS) -> NDArray[np.uint64]:
    """`count` ≤ 8 keys of 64 bits, by BLAKE2b from the parts' texts joined by `/`: the same everywhere."""
    text = "/".join(map(str, parts)).encode()
    digest = hashlib.blake2b(text, digest_size=8 * count).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def key_number(*parts: object) -> int:
    """The first key alone, as a plain number: one of a sample is asked for at a time."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al., 2014): each input bit changes about half of the output's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """One permutation of `size` numbers.

    Args:
        size: From 1 to 2⁶².
        key: What it is drawn from; other parts give another permutation.
    """

    def __init__(self, size: int, *key: object) -> None:
        if not 1 <= size <= LARGEST:
            raise ValueError(f"a permutation of {size} numbers")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low = np.uint64((1 << bits // 2) - 1)
        self._high = np.uint64((1 << bits - bits // 2) - 1)
        self._keys = keys(*key)
        self._small: Indices | None = None
        if size <= SMALL:
            ranks = mixed(mixed(np.arange(size, dtype=np.uint64) + self._keys[0]) ^ self._keys[1])
            self._small = np.argsort(ranks, kind="stable").astype(np.int64)

    def __call__(self, indices: Indices) -> Indices:
        """(count,) int64, each 0 ≤ index < size → where each one goes, (count,) int64."""
        if self._small is not None:
            return self._small[indices]
        places = self._pass(indices.astype(np.uint64))
        beyond = np.flatnonzero(places >= self.size)
        while beyond.size:
            again = self._pass(places[beyond])
            places[beyond] = again
            beyond = beyond[again >= self.size]
        return places.astype(np.int64)

    def _pass(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = values >> self._low_bits, values & self._low
        for index, key in enumerate(self._keys):
            if index % 2:
                low = low ^ (mixed(high + key) & self._low)
            else:
                high = high ^ (mixed(low + key) & self._high)
        return (high << self._low_bits) | low
