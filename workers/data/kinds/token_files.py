"""Kinds `bytes` and `tokens`: tokens one after another, in windows or documents, mapped from files.

| file | dtype | documents |
|---|---|---|
| any (kind bytes) | uint8 | no |
| `.npy`, one dimension | its own | no |
| `.bin` | `data.dtype` | no |
| `.bin` with `.idx` beside it (Megatron's) | its own | yes |

A remote file is copied to this machine's disk first, and mapped there. So none is ever in memory as a whole,
but for sources of bytes of at most `MOST_IN_MEMORY`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bus.logs import get_logger
from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from workers.data.kinds.byte_windows import read_bytes
from workers.data.permutation import Indices
from workers.data.samples import Opening, Samples
from workers.data.source_files import SourceFile, copy_file, files_digest, list_files
from workers.data.windows import JoinedTokens, TokenArray

log = get_logger("data")

IGNORED = -100
"""The target of a place that no loss counts: `ignore_index` of torch's cross-entropy."""

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_HEAD = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class WindowSamples:
    """Windows one after another: sample i is tokens i·T … i·T + T, of which the last is a target only.

    Args:
        tokens: The tokens.
        sample_tokens: T.
        digest: Of the data.
    """

    def __init__(self, tokens: JoinedTokens, sample_tokens: int, digest: str) -> None:
        self._tokens = tokens
        self._length = sample_tokens
        self.digest = digest

    def __len__(self) -> int:
        return max(0, (self._tokens.size - 1) // self._length)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {name: values[0] for name, values in self.gather([index]).items()}

    def gather(self, indices: Sequence[int]) -> Mapping[str, Any]:
        length = self._length
        windows = np.empty((len(indices), length + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            windows[row] = self._tokens[index * length : index * length + length + 1]
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}

    def close(self) -> None:
        self._tokens = JoinedTokens([])


class DocumentSamples:
    """Documents, each cut off after T + 1 tokens, and filled up with zeros whose targets no loss counts.

    Args:
        tokens: The tokens.
        starts: Where each document begins, (documents + 1,) int64; the last is where the last one ends.
        sample_tokens: T.
        digest: Of the data.
    """

    def __init__(self, tokens: JoinedTokens, starts: Indices, sample_tokens: int, digest: str) -> None:
        self._tokens, self._starts, self._length = tokens, starts, sample_tokens
        self.digest = digest

    def __len__(self) -> int:
        return self._starts.size - 1

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        first, end = int(self._starts[index]), int(self._starts[index + 1])
        document = self._tokens[first : min(end, first + self._length + 1)].astype(np.int64)
        inputs = np.zeros(self._length, dtype=np.int64)
        targets = np.full(self._length, IGNORED, dtype=np.int64)
        inputs[: min(document.size, self._length)] = document[: self._length]
        targets[: max(0, document.size - 1)] = document[1:]
        return {"inputs": inputs, "targets": targets}

    def close(self) -> None:
        self._tokens = JoinedTokens([])


def token_stream(spec: SourceSpec, opening: Opening) -> tuple[JoinedTokens, str]:
    """All tokens of a source of kind bytes or tokens, and its digest.

    Raises:
        BadData: See `open_tokens`.
    """
    if spec.kind == "bytes":
        files, content = read_bytes(spec, opening.fetched, f"{opening.at}.source", opening.spool)
        return content, files_digest(files)
    tokens, _, digest = map_tokens(spec, opening)
    return tokens, digest


def open_bytes(spec: SourceSpec, opening: Opening) -> Samples:
    """Kind bytes in windows one after another; see `token_stream` for those from anywhere."""
    tokens, digest = token_stream(spec, opening)
    return _checked(WindowSamples(tokens, spec.sample_tokens, digest), spec, opening, tokens.size)


def open_tokens(spec: SourceSpec, opening: Opening) -> Samples:
    """Kind tokens.

    Raises:
        BadData: A file is of another format, its dtype is not known, or it holds no documents.
    """
    tokens, starts, digest = map_tokens(spec, opening)
    if spec.unit == "windows":
        return _checked(WindowSamples(tokens, spec.sample_tokens, digest), spec, opening, tokens.size)
    if starts is None:
        raise BadData(
            f"{opening.at}.unit: documents needs Megatron's .idx beside each .bin, and {spec.source} has "
            "none; say windows"
        )
    return DocumentSamples(tokens, starts, spec.sample_tokens, digest)


def map_tokens(spec: SourceSpec, opening: Opening) -> tuple[JoinedTokens, Indices | None, str]:
    """The tokens of all files in order; where each document begins, if all files say so; the digest.

    Raises:
        BadData: See `open_tokens`.
    """
    key = f"{opening.at}.source"
    files = list_files(spec.source, opening.fetched, key=key, endings=(".npy", ".bin", ".idx"))
    by_name = {file.name: file for file in files}
    indices = {name.removesuffix(".idx"): file for name, file in by_name.items() if name.endswith(".idx")}
    arrays: list[TokenArray] = []
    starts: list[tuple[int, Indices]] = []
    for file in files:
        if file.name.endswith(".idx"):
            continue
        index = indices.get(file.name.removesuffix(".bin")) or _beside(file)
        path = _local(file, opening.spool)
        if file.name.endswith(".npy"):
            array = _npy(path, file.name, key)
        elif index is not None:
            array, ends = _megatron(path, _local(index, opening.spool), key)
            starts.append((sum(each.size for each in arrays), ends))
        elif spec.dtype is None:
            raise BadData(
                f"{key} {file.name}: say which type its tokens have, for example data.dtype: uint16"
            )
        else:
            array = _flat(path, np.dtype(spec.dtype).newbyteorder("<"), file, key)
        arrays.append(array)
    if not arrays or not sum(array.size for array in arrays):
        raise BadData(f"{key} {spec.source} is empty: it has no tokens")
    if len({array.dtype.kind + str(array.dtype.itemsize) for array in arrays}) > 1:
        raise BadData(f"{key} {spec.source}: its files have tokens of different types; give one type in each")
    begins = None
    if len(starts) == len(arrays):
        total = sum(array.size for array in arrays)
        begins = np.concatenate([first + ends[:-1] for first, ends in starts] + [np.array([total])])
    return JoinedTokens(arrays), begins, files_digest(files, spec.dtype)


def _checked(samples: WindowSamples, spec: SourceSpec, opening: Opening, tokens: int) -> WindowSamples:
    if not len(samples):
        raise BadData(
            f"{opening.at}.source {spec.source} has {tokens:,} tokens, less than one sample of "
            f"{spec.sample_tokens} and its successor; give more data, or lower data.sample_tokens"
        )
    return samples


def _beside(file: SourceFile) -> SourceFile | None:
    """The index of one named .bin file."""
    if file.local is None or file.local.suffix != ".bin":
        return None
    index = file.local.with_suffix(".idx")
    return SourceFile(index.name, index.stat().st_size, local=index) if index.exists() else None


def _local(file: SourceFile, spool: Path) -> Path:
    if file.local is not None:
        return file.local
    path = spool / f"{len(list(spool.iterdir()))}-{file.name.rpartition('/')[2]}"
    log.info("copying a remote file of tokens to this machine", file=file.name, bytes=file.size)
    with path.open("wb") as target:
        copy_file(file, target)
    return path


def _npy(path: Path, name: str, key: str) -> TokenArray:
    try:
        array: TokenArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise BadData(f"{key} {name} is no NumPy array: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = ",".join(map(str, array.shape))
        raise BadData(f"{key} {name} is [{shape}] {array.dtype}; tokens are one dimension of integers")
    return array


def _flat(path: Path, dtype: np.dtype[Any], file: SourceFile, key: str) -> TokenArray:
    if file.size % dtype.itemsize:
        raise BadData(
            f"{key} {file.name} has {file.size:,} bytes, which are no whole number of {dtype} tokens"
        )
    return np.memmap(path, dtype=dtype, mode="r") if file.size else np.zeros(0, dtype=dtype)


def _megatron(path: Path, index: Path, key: str) -> tuple[TokenArray, Indices]:
    """The tokens, and where each document begins and the last one ends."""
    with index.open("rb") as file:
        head = file.read(_MEGATRON_HEAD.size).ljust(_MEGATRON_HEAD.size)
        magic, version, code, sequences, documents = _MEGATRON_HEAD.unpack(head)
        if magic != _MEGATRON or version != 1 or code not in _MEGATRON_TYPES:
            raise BadData(f"{key} {index.name} is no index of tokens as Megatron writes it (version 1)")
        sizes = np.fromfile(file, dtype="<i4", count=sequences).astype(np.int64)
        pointers = np.fromfile(file, dtype="<i8", count=sequences)
        firsts = np.fromfile(file, dtype="<i8", count=documents)
    dtype = np.dtype(_MEGATRON_TYPES[code])
    ends = np.concatenate([[0], np.cumsum(sizes)])
    tokens: TokenArray = np.memmap(path, dtype=dtype, mode="r")
    fits = firsts.size == documents and pointers.size == sequences and tokens.size == ends[-1]
    if not fits or not np.array_equal(pointers, ends[:-1] * dtype.itemsize):
        raise BadData(f"{key} {path.name} does not fit its index {index.name}; copy both again")
    begins = ends[firsts] if documents and firsts[-1] == sequences else ends
    return tokens, np.unique(begins)
