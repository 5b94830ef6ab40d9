"""A shard and its index: samples that are found by arithmetic, and blocks that are checked before their use.

| content | shard | borders | firsts |
|---|---|---|---|
| records | JSON lines | bytes at which each record begins, and the end | — |
| documents | tokens | tokens at which each document begins, and the end | — |
| windows, concatenate | tokens | the same; a window is T tokens and the one behind | — |
| windows, best_fit | tokens | of segments, each with the token behind its inputs | a sample's first segment |

Tokens are little-endian, one after another, without any head: other programs read them as they are. The
index:

    8 bytes    magic
    3 × u64    numbers of borders, firsts, blocks
    u64 …      borders, firsts
    16 bytes … BLAKE2b of each MiB of the shard
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schemas.errors import BadData

MAGIC = b"DMSCIDX1"
BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 16
_HEAD = struct.Struct("<8sQQQ")

Borders = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardIndex:
    """What the index of a shard says.

    Attributes:
        borders: (samples or segments + 1,) where each begins, and where the last one ends.
        firsts: (samples + 1,) the first segment of each sample; empty where a sample is no list of segments.
        blocks: The digests of the shard's blocks, one after another.
    """

    borders: Borders
    firsts: Borders
    blocks: bytes

    @classmethod
    def read(cls, content: bytes, what: str) -> ShardIndex:
        """The index that these bytes are.

        Raises:
            BadData: They are none.
        """
        if len(content) >= _HEAD.size:
            magic, borders, firsts, blocks = _HEAD.unpack_from(content)
            if magic == MAGIC and len(content) == _HEAD.size + 8 * (borders + firsts) + DIGEST_BYTES * blocks:
                numbers = np.frombuffer(content, "<i8", borders + firsts, _HEAD.size)
                return cls(
                    numbers[:borders], numbers[borders:], content[len(content) - DIGEST_BYTES * blocks :]
                )
        raise BadData(f"{what} is no index of a data set's shard")

    def matches(self, number: int, content: bytes | memoryview) -> bool:
        """Whether a block is the one that was built."""
        return block_digest(content) == self.blocks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


def write_index(path: Path, shard: Path, borders: Iterable[int], firsts: Iterable[int] = ()) -> None:
    """Writes the index of a shard that is written."""
    begins, segments = (np.array(numbers, "<i8") for numbers in (list(borders), list(firsts)))
    blocks = bytearray()
    with shard.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            blocks += block_digest(block)
    with path.open("wb") as file:
        file.write(_HEAD.pack(MAGIC, len(begins), len(segments), len(blocks) // DIGEST_BYTES))
        file.write(begins.tobytes() + segments.tobytes() + bytes(blocks))


def block_digest(content: bytes | memoryview) -> bytes:
    """What a block is compared by."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
