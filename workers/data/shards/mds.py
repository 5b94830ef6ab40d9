"""MDS shards, as MosaicML Streaming writes them (its `streaming/base/format/mds`, version 2).

`index.json` lists the shards with their columns. A shard is: number of samples n (uint32), n + 1 offsets of
samples from the file's start (uint32 each), the columns again as JSON, the samples. A sample is: the lengths
of its columns that have no fixed one (uint32 each), then the values.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import BadData
from workers.data.samples import UnreadableSample
from workers.data.shards.decoding import Decoder, mds_decoder, mds_form
from workers.data.shards.shard_samples import ShardFormat, content_marks
from workers.data.shards.unpacked import KINDS, UnpackedReader, UnpackedShards
from workers.data.storage.range_reader import RangeReader, Storage
from workers.data.storage.sources import FilePart

INDEX = "index.json"
MOST_INDEX_BYTES = 1 << 30
MOST_OFFSETS = 1 << 24
"""Offsets of samples that are kept in memory, 4 bytes each."""
UNPACKED_BYTES = 640 << 20
"""Content of compressed shards in memory: as many as the order shuffles together, at MDS' usual 64 MiB."""


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    encoding: str
    size: int | None
    decode: Decoder


@dataclass(frozen=True, slots=True)
class _Shard:
    file: str
    bytes: int
    content_bytes: int
    samples: int
    packed: str
    columns: tuple[_Column, ...]


class MdsShards(ShardFormat):
    """The shards below one URL.

    Raises:
        BadData: there is no index, or it is none of MDS, or it names what can't be read.
    """

    def __init__(self, storage: Storage, at: str) -> None:
        self._storage = storage
        index = storage.open(INDEX)
        if index.size > MOST_INDEX_BYTES:
            raise BadData(f"{index.described} has {index.size:,} bytes; an index has at most 1 GiB")
        self._text = index.read(0, index.size)
        self._shards = _parse(self._text, index.described, at)
        self.counts = np.array([shard.samples for shard in self._shards], dtype=np.int64)
        self.file_bytes = np.array([shard.content_bytes for shard in self._shards], dtype=np.int64)
        self._readers: dict[int, RangeReader] = {}
        self._offsets: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()
        self._offset_count = 0
        self._row_bytes = _row_bytes(self._shards)
        self._first_rows: dict[int, int | None] = {}
        self._unpacked = UnpackedShards(UNPACKED_BYTES)
        self._lock = threading.Lock()

    @property
    def columns(self) -> dict[str, str]:
        """Column → encoding."""
        return {column.name: column.encoding for shard in self._shards for column in shard.columns}

    def identity(self) -> bytes:
        """The index, and the ends of local shards: with rows of a fixed size, other data have the same index.

        Of remote ones the index alone: more would take a request for each shard at each start.
        """
        local = () if self._storage.source.cached else self._shards
        marks = content_marks([self._storage.open(shard.file) for shard in local])
        return b"mds\n" + self._text + "\n".join(marks).encode()

    def name(self, shard: int) -> str:
        return self._storage.source.described(self._shards[shard].file)

    def reader(self, shard: int) -> RangeReader:
        reader = self._readers.get(shard)
        if reader is None:
            reader = self._open(shard)
            with self._lock:
                reader = self._readers.setdefault(shard, reader)
        return reader

    def _open(self, shard: int) -> RangeReader:
        facts = self._shards[shard]
        reader = self._storage.open(facts.file, tag=shard)
        if reader.size != facts.bytes:
            raise BadData(
                f"{reader.described} has {reader.size:,} bytes, and {INDEX} says {facts.bytes:,}: "
                "it is cut off, or of another data set; write it again"
            )
        if not facts.packed:
            return reader
        return UnpackedReader(self._storage, reader, facts.packed, facts.content_bytes, shard, self._unpacked)

    def _offsets_of(self, shard: int) -> NDArray[np.uint32]:
        """(samples + 1,) offsets within the shard's content."""
        with self._lock:
            if shard in self._offsets:
                self._offsets.move_to_end(shard)
                return self._offsets[shard]
        reader, samples = self.reader(shard), self._shards[shard].samples
        head = reader.read(0, 4 * (samples + 2))
        if len(head) != 4 * (samples + 2) or struct.unpack_from("<I", head)[0] != samples:
            raise BadData(
                f"{reader.described} is damaged: its head does not tell of the {samples:,} samples that "
                f"{INDEX} says it has; write it again"
            )
        offsets = np.frombuffer(head, "<u4", offset=4).astype(np.uint32)
        with self._lock:
            if shard not in self._offsets:
                self._offsets[shard] = offsets
                self._offset_count += offsets.size
            while self._offset_count > MOST_OFFSETS and len(self._offsets) > 1:
                self._offset_count -= self._offsets.popitem(last=False)[1].size
        return offsets

    def raw(self, shard: int, sample: int) -> bytes:
        offsets = self._offsets_of(shard)
        start, end = int(offsets[sample]), int(offsets[sample + 1])
        least = 4 * (self._shards[shard].samples + 2)
        if not least <= start <= end <= self._shards[shard].content_bytes:
            raise UnreadableSample(
                f"{self.name(shard)}: sample {sample} lies at bytes {start}–{end}, not in it"
            )
        return self.reader(shard).read(start, end - start)

    def decode(self, shard: int, sample: int, data: bytes, columns: Mapping[str, str]) -> dict[str, Any]:
        own = self._shards[shard].columns
        place, lengths = 0, []
        for column in own:
            length = column.size
            if length is None:
                length = int(struct.unpack_from("<I", data, place)[0])
                place += 4
            lengths.append(length)
        if place + sum(lengths) != len(data):
            raise ValueError(f"its columns have {place + sum(lengths):,} bytes, and it has {len(data):,}")
        values: dict[str, bytes] = {}
        decoders = {column.name: column.decode for column in own}
        for column, length in zip(own, lengths, strict=True):
            values[column.name] = data[place : place + length]
            place += length
        chosen = columns or {name: name for name in values}
        return {name: decoders[column](values[column]) for name, column in chosen.items()}

    @property
    def row_bytes(self) -> int | None:
        return self._row_bytes

    def rows(self, rows: Sequence[bytes], columns: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        table = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)
        values: dict[str, NDArray[Any]] = {}
        place = 0
        for column in self._shards[0].columns:
            form = mds_form(column.encoding)
            assert form is not None
            dtype, shape = form
            end = place + dtype.itemsize * math.prod(shape)
            values[column.name] = np.ascontiguousarray(table[:, place:end]).view(dtype).reshape(-1, *shape)
            place = end
        chosen = columns or {name: name for name in values}
        return {name: values[column] for name, column in chosen.items()}

    def read_rows(
        self, places: Sequence[tuple[int, int]], columns: Mapping[str, str]
    ) -> dict[str, NDArray[Any]] | None:
        if not self._row_bytes:
            return None
        values: dict[str, NDArray[Any]] = {}
        targets: list[tuple[memoryview, int]] = []
        for column in self._shards[0].columns:
            form = mds_form(column.encoding)
            assert form is not None
            values[column.name] = np.empty((len(places), *form[1]), form[0])
            targets.append((values[column.name].data.cast("B"), values[column.name][0].nbytes))
        parts: dict[int, list[FilePart]] = {}
        for row, (shard, sample) in enumerate(places):
            first = self._first_row(shard)
            if first is None:
                return None
            there = [target[row * size : (row + 1) * size] for target, size in targets]
            parts.setdefault(shard, []).append((first + sample * self._row_bytes, there))
        for shard, mine in parts.items():
            if not self.reader(shard).read_into(mine, self._row_bytes):
                return None
        chosen = columns or {name: name for name in values}
        return {name: values[column] for name, column in chosen.items()}

    def _first_row(self, shard: int) -> int | None:
        """Where the first row begins, if the shard is not packed and its rows follow each other."""
        if shard not in self._first_rows:
            offsets = self._offsets_of(shard).astype(np.int64)
            least, most = 4 * offsets.size + 4, self._shards[shard].content_bytes
            follow = bool((np.diff(offsets) == self._row_bytes).all())
            is_whole = follow and least <= offsets[0] and offsets[-1] <= most
            plain = is_whole and not self._shards[shard].packed
            self._first_rows[shard] = int(offsets[0]) if plain else None
        return self._first_rows[shard]


def _row_bytes(shards: Sequence[_Shard]) -> int | None:
    """The bytes of a sample, if all columns have a fixed form, the same in all shards."""
    forms = {tuple((column.name, column.encoding, column.size) for column in each.columns) for each in shards}
    if len(forms) != 1:
        return None
    total = 0
    for _, encoding, size in forms.pop():
        form = mds_form(encoding)
        if form is None or size != form[0].itemsize * math.prod(form[1]):
            return None
        total += size
    return total


def _parse(text: bytes, where: str, at: str) -> tuple[_Shard, ...]:
    try:
        index = json.loads(text)
        version, listed = index["version"], index["shards"]
        if version != 2:
            raise BadData(f"{where}: MDS of version {version}; version 2 is read")
        return tuple(_shard(facts, f"{where}: shard {number}") for number, facts in enumerate(listed))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise BadData(f"{at}.source {where} is no index of MDS shards ({what[:100]})") from None


def _shard(facts: dict[str, Any], where: str) -> _Shard:
    if facts["format"] != "mds":
        raise BadData(f"{where} has the format {facts['format']}; shards of MDS and WebDataset are read")
    raw, packed = facts["raw_data"], facts.get("zip_data")
    kind = str(facts.get("compression") or "").partition(":")[0]
    if packed is not None and kind not in KINDS:
        raise BadData(f"{where} is compressed by {kind}, which is not read; there are {', '.join(KINDS)}")
    columns = []
    for name, encoding, size in zip(
        facts["column_names"], facts["column_encodings"], facts["column_sizes"], strict=True
    ):
        decode = mds_decoder(encoding, f"{where}, column {name}")
        form = mds_form(encoding)
        fixed = None if form is None else form[0].itemsize * math.prod(form[1])
        if size and size != fixed and fixed is not None:
            raise BadData(f"{where}, column {name}: {size} bytes for {encoding}, which has {fixed}")
        columns.append(_Column(str(name), encoding, int(size) if size else None, decode))
    stored = packed if packed is not None else raw
    shard = _Shard(
        str(stored["basename"]),
        int(stored["bytes"]),
        int(raw["bytes"]),
        int(facts["samples"]),
        kind if packed is not None else "",
        tuple(columns),
    )
    if min(shard.bytes, shard.content_bytes, shard.samples) < 0:
        raise BadData(f"{where}: a size is negative")
    return shard
