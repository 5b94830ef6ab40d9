"""On which side of the split a record is: a keyed hash of its content, so that it keeps its side."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from workers.data_builds.reading import UnfitRecord, text_of, written

_BITS = 64


class SplitDraw:
    """Draws splits.

    A record's text alone decides, or all of the record if it has none: equal texts never are on both sides,
    and a record keeps its side in the next version, whatever is added, dropped or cut otherwise.

    Args:
        seed: Keys the hash.
        fraction: Share of records for validation.
        field: What holds the text.
    """

    def __init__(self, seed: int, fraction: float, field: str) -> None:
        self._key = seed.to_bytes(8, "little") + b"split"
        self._below = int(fraction * (1 << _BITS))
        self._field = field

    def split(self, record: Mapping[str, Any]) -> str:
        """`train` or `validation`."""
        if not self._below:
            return "train"
        try:
            content = text_of(record, self._field).encode()
        except UnfitRecord:
            content = written(dict(sorted(record.items())))
        digest = hashlib.blake2b(content, digest_size=8, key=self._key).digest()
        return "validation" if int.from_bytes(digest, "little") < self._below else "train"
