"""WebDataset's tar files: each is looked through once, and its index is kept on disk.

A sample is the run of members with one name up to the first dot (`a/0001.jpg`, `a/0001.cls`); the rest of the
name, in lower case, is what its part is called.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import secrets
import tarfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.logs import get_logger
from schemas.errors import BadData
from workers.data.samples import UnreadableSample
from workers.data.shards.decoding import Decoder, ending_decoder
from workers.data.shards.shard_samples import FILES_AT_ONCE, ShardFormat, content_marks
from workers.data.storage.range_reader import RangeReader, Storage

log = get_logger("data")

FORMAT = 1
_BLOCK = 512


@dataclass(frozen=True)
class TarIndex:
    """Where the samples of one tar file lie.

    Attributes:
        keys: Each sample's name.
        endings: What parts of samples are called.
        firsts: (samples + 1,) int64: the first part of each sample.
        kinds: (parts,) int16: which ending.
        starts, lengths: (parts,) int64: bytes within the file.
    """

    keys: tuple[str, ...]
    endings: tuple[str, ...]
    firsts: NDArray[np.int64]
    kinds: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def packed(self) -> bytes:
        arrays = (self.firsts, self.kinds, self.starts, self.lengths)
        content = {
            "format": FORMAT,
            "keys": self.keys,
            "endings": self.endings,
            "arrays": [array.tolist() for array in arrays],
        }
        data = zlib.compress(json.dumps(content).encode(), 1)
        return hashlib.blake2b(data, digest_size=16).digest() + data

    @classmethod
    def unpacked(cls, data: bytes) -> TarIndex | None:
        """The index in these bytes; None if they are damaged."""
        if hashlib.blake2b(data[16:], digest_size=16).digest() != data[:16]:
            return None
        content = json.loads(zlib.decompress(data[16:]))
        if content["format"] != FORMAT:
            return None
        arrays = [np.array(array, dtype=np.int64) for array in content["arrays"]]
        return cls(tuple(content["keys"]), tuple(content["endings"]), *arrays)

    def span(self, sample: int) -> tuple[int, int]:
        """(start, end) of all parts of a sample, with what lies between them."""
        parts = slice(int(self.firsts[sample]), int(self.firsts[sample + 1]))
        ends = self.starts[parts] + self.lengths[parts]
        return int(self.starts[parts].min()), int(ends.max())


def index_tar(reader: RangeReader) -> TarIndex:
    """Looks through a tar file: its heads only, as far as blocks of the file allow.

    Raises:
        BadData: it is no tar file, is compressed, or ends too early.
    """
    keys: list[str] = []
    endings: dict[str, int] = {}
    firsts: list[int] = []
    parts: list[tuple[int, int, int]] = []
    where = reader.described
    seen: set[str] = set()
    try:
        with reader.as_file() as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or all heads stay in memory
                if not member.isreg():
                    continue
                folder, name = posixpath.split(member.name)
                stem, dot, ending = name.partition(".")
                if not dot or not stem or not ending:
                    continue
                key, ending = posixpath.join(folder, stem), ending.lower()
                if not keys or keys[-1] != key:
                    keys.append(key)
                    firsts.append(len(parts))
                    seen = set()
                if ending in seen:
                    raise BadData(f"{where}: {key}.{ending} is in it twice in a row")
                seen.add(ending)
                if member.offset_data + member.size > reader.size:
                    raise BadData(f"{where} ends within {member.name}: it is cut off; write it again")
                parts.append((endings.setdefault(ending, len(endings)), member.offset_data, member.size))
            end = tar.offset
    except tarfile.TarError as error:
        raise BadData(f"{where} can't be read as a tar file: {error}{_compressed(reader)}") from None
    if reader.read(end, _BLOCK).strip(b"\0"):
        raise BadData(f"{where} is damaged at byte {end:,}: there is no head of a member; write it again")
    arrays = np.array(parts, dtype=np.int64).reshape(-1, 3)
    return TarIndex(
        tuple(keys),
        tuple(endings),
        np.array([*firsts, len(parts)], dtype=np.int64),
        *(np.ascontiguousarray(arrays[:, column]) for column in range(3)),
    )


def _compressed(reader: RangeReader) -> str:
    known = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\x28\xb5": "zstd", b"\xfd7": "xz"}
    kind = known.get(reader.read(0, 2))
    return "" if kind is None else f"; it is compressed by {kind}, and has no ranges then: unpack it first"


class IndexFolder:
    """Indices on disk, so that a file is looked through once per node. None of its errors matters."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, key: str) -> TarIndex | None:
        if self._folder is None:
            return None
        try:
            return TarIndex.unpacked((self._folder / key).read_bytes())
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None

    def store(self, key: str, index: TarIndex) -> None:
        if self._folder is None:
            return
        partial = self._folder / f".{secrets.token_hex(8)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(index.packed())
            os.replace(partial, self._folder / key)
        except OSError:
            with suppress(OSError):
                partial.unlink()


class TarShards(ShardFormat):
    """Tar files, each opened and looked through at once.

    Args:
        storage: Where they are.
        files: Their names there.
        indices: Where their indices are kept.

    Raises:
        BadData: a file is none that can be read, or holds what can't.
    """

    def __init__(self, storage: Storage, files: Sequence[str], indices: IndexFolder) -> None:
        self._storage = storage
        self._files = tuple(files)
        with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="index") as threads:
            self._readers = list(threads.map(storage.open, files, range(len(files))))
            self._indices = list(threads.map(lambda reader: self._index(reader, indices), self._readers))
        self.counts = np.array([len(index.keys) for index in self._indices], dtype=np.int64)
        self.file_bytes = np.array([reader.size for reader in self._readers], dtype=np.int64)
        self._decoders: dict[str, Decoder] = {}
        self._lock = threading.Lock()
        first = next((index for index in self._indices if index.keys), None)
        if first is None:
            raise BadData(
                f"{storage.source.described('')}: no samples are in it; WebDataset's are files as 0001.jpg "
                "beside 0001.cls"
            )
        self.endings = tuple(sorted(self._endings(first, 0)))

    @staticmethod
    def _index(reader: RangeReader, indices: IndexFolder) -> TarIndex:
        if not reader.size or not reader.state.mark:
            return index_tar(reader)
        key = reader.key(0)
        index = indices.load(key)
        if index is None:
            index = index_tar(reader)
            indices.store(key, index)
        return index

    @staticmethod
    def _endings(index: TarIndex, sample: int) -> list[str]:
        parts = range(int(index.firsts[sample]), int(index.firsts[sample + 1]))
        return [index.endings[int(index.kinds[part])] for part in parts]

    def identity(self) -> bytes:
        digest = hashlib.sha256(b"webdataset\n")
        for file, index, mark in zip(self._files, self._indices, content_marks(self._readers), strict=True):
            digest.update(f"{file}\n{mark}\n".encode())
            digest.update(json.dumps([index.keys, index.endings]).encode())
            for array in (index.firsts, index.kinds, index.starts, index.lengths):
                digest.update(array.tobytes())
        return digest.digest()

    def name(self, shard: int) -> str:
        return self._readers[shard].described

    def key(self, shard: int, sample: int) -> str:
        return self._indices[shard].keys[sample]

    def reader(self, shard: int) -> RangeReader:
        return self._readers[shard]

    def raw(self, shard: int, sample: int) -> bytes:
        start, end = self._indices[shard].span(sample)
        return self._readers[shard].read(start, end - start)

    def decode(self, shard: int, sample: int, data: bytes, columns: Mapping[str, str]) -> dict[str, Any]:
        index = self._indices[shard]
        start, _ = index.span(sample)
        parts: dict[str, bytes] = {}
        for part in range(int(index.firsts[sample]), int(index.firsts[sample + 1])):
            place = int(index.starts[part]) - start
            parts[index.endings[int(index.kinds[part])]] = data[place : place + int(index.lengths[part])]
        chosen = columns or {ending: ending for ending in self.endings}
        if missing := [ending for ending in chosen.values() if ending not in parts]:
            raise UnreadableSample(f"{self.name(shard)}: {self.key(shard, sample)} has no .{missing[0]}")
        values: dict[str, Any] = {}
        for name, ending in chosen.items():
            value = self._decoder(ending, shard)(parts[ending])
            if isinstance(value, dict) and ending.rpartition(".")[2] == "npz":
                values |= {f"{name}.{member}": array for member, array in value.items()}
            else:
                values[name] = value
        return values

    def _decoder(self, ending: str, shard: int) -> Decoder:
        if ending not in self._decoders:
            self._decoders[ending] = ending_decoder(ending, self.name(shard))
        return self._decoders[ending]
