"""Reads files by pieces, and takes the digests of files and of the weights in them: no torch, no whole file.

A safetensors file consists of 8 bytes with the header's length (little endian), the header as JSON
(`name → dtype, shape, data_offsets`), and the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bus.files.artifacts import ReadableArtifacts
from schemas.errors import BadData, BadInput
from schemas.models.version import ModelFile
from schemas.weights_digest import DTYPES, tensor_line

HEADER_BYTES = 100 << 20
"""Largest header that is read; safetensors itself reads no larger one."""
SMALL_BYTES = 16 << 20
"""Largest file that is kept as a whole: a config, an index, a tokenizer."""
SHARD = ".safetensors"


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """What was read: each file's digest, each tensor's line, and the small files' bytes."""

    files: tuple[ModelFile, ...]
    tensors: dict[str, str]
    weights_bytes: int
    small: dict[str, bytes]


async def read_weights(folder: ReadableArtifacts, names: Iterable[str]) -> WeightsRead:
    """Reads these files of a folder once.

    Raises:
        BadData: a shard is no safetensors file, or two shards hold one tensor.
        NotFound: a file is not there.
    """
    files: list[ModelFile] = []
    tensors: dict[str, str] = {}
    small: dict[str, bytes] = {}
    total = 0
    for name in names:
        reading = _Reading(name)
        kept: list[bytes] = []
        async for piece in folder.open_range(name):
            reading.take(piece)
            if not name.endswith(SHARD) and reading.size <= SMALL_BYTES:
                kept.append(piece)
        lines = reading.lines()
        if twice := tensors.keys() & lines.keys():
            raise BadData(f"{name}: {min(twice)} is in another shard, too")
        tensors |= lines
        total += reading.weights_bytes
        if not name.endswith(SHARD) and reading.size <= SMALL_BYTES:
            small[name] = b"".join(kept)
        files.append(ModelFile(name=name, bytes=reading.size, sha256=reading.whole.hexdigest()))
    if not tensors:
        raise BadInput("there are no weights: name the safetensors files of a folder")
    return WeightsRead(tuple(files), tensors, total, small)


class _Reading:
    """The digests of one file, from its pieces in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self.whole = hashlib.sha256()
        self.weights_bytes = 0
        self._head = bytearray()
        self._head_bytes: int | None = None if name.endswith(SHARD) else 0
        self._ahead: list[tuple[int, int, str, dict[str, Any]]] | None = None
        self._digests: dict[str, Any] = {}
        self._about: dict[str, dict[str, Any]] = {}

    def take(self, piece: bytes) -> None:
        """Takes the next piece. Raises `BadData` for a header that is none."""
        start = self.size
        self.size += len(piece)
        self.whole.update(piece)
        if not self.name.endswith(SHARD):
            return
        if self._ahead is None:
            self._head += piece
            if not self._parse():
                return
            assert self._head_bytes is not None
            data, start = bytes(self._head[self._head_bytes :]), self._head_bytes
            self._head.clear()
        else:
            data = piece
        self._hash(memoryview(data), start - (self._head_bytes or 0))

    def _parse(self) -> bool:
        """Whether the header is complete; reads it then."""
        if self._head_bytes is None:
            if len(self._head) < 8:
                return False
            self._head_bytes = 8 + int.from_bytes(self._head[:8], "little")
            if self._head_bytes > HEADER_BYTES:
                raise BadData(f"{self.name} is not a safetensors file: its header would be too long")
        if len(self._head) < self._head_bytes:
            return False
        try:
            header = json.loads(bytes(self._head[8 : self._head_bytes]))
            found = [
                (int(about["data_offsets"][0]), int(about["data_offsets"][1]), name, about)
                for name, about in header.items()
                if name != "__metadata__"
            ]
            self._about = {
                name: {"dtype": str(a["dtype"]), "shape": list(a["shape"])} for *_, name, a in found
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise BadData(f"{self.name} is not a safetensors file: {error}") from None
        self._ahead = sorted(found, key=lambda entry: entry[:2])
        place = 0
        for begin, end, name, _ in self._ahead:
            if begin != place or end < begin:
                raise BadData(f"{self.name}: the bytes of {name} overlap others, or leave a gap")
            place = end
        self.weights_bytes = place
        self._digests = {name: hashlib.sha256() for *_, name, _ in self._ahead}
        return True

    def _hash(self, data: memoryview, start: int) -> None:
        """Adds data that begins `start` bytes after the header to the tensors that it belongs to."""
        assert self._ahead is not None
        end = start + len(data)
        while self._ahead:
            first, last, name, _ = self._ahead[0]
            if first >= end and last > first:
                return
            self._digests[name].update(data[max(first, start) - start : max(0, min(last, end) - start)])
            if last > end:
                return
            self._ahead.pop(0)

    def lines(self) -> dict[str, str]:
        """Each tensor's line (`schemas.weights_digest`). Raises `BadData` if the file ends too early."""
        if not self.name.endswith(SHARD):
            return {}
        if self._ahead is None or self._ahead or self.size != (self._head_bytes or 0) + self.weights_bytes:
            raise BadData(f"{self.name} is not a safetensors file: it ends too early, or too late")
        return {
            name: tensor_line(DTYPES.get(about["dtype"], about["dtype"]), about["shape"], digest.hexdigest())
            for name, digest in self._digests.items()
            for about in (self._about[name],)
        }
