"""Which format a file has, by its first bytes: a container is never trained as if its bytes were text."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from schemas.errors import BadData
from schemas.urls import STDLIB
from workers.data.source_files import SourceFile

HEAD_BYTES = 512

_UNPACK = "unpack it first"
_TABLE = "say data.kind: table, or text for one column of texts"
_IMAGES = "say data.kind: images"
_OWN = "read it by code of your own: data.kind: factory"

_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "Parquet", _TABLE),
    (b"ARROW1", "Arrow", "say data.kind: huggingface, or table"),
    (b"\x93NUMPY", "a NumPy array", "say data.kind: tokens, if it is one of tokens"),
    (b"MMIDIDX\x00\x00", "Megatron's index", "say data.kind: tokens"),
    (b"\x1f\x8b", "gzip", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "Zstandard", _UNPACK),
    (b"BZh", "bzip2", _UNPACK),
    (b"\xfd7zXZ\x00", "xz", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", _UNPACK),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"\x89PNG\r\n", "PNG", _IMAGES),
    (b"\xff\xd8\xff", "JPEG", _IMAGES),
    (b"GIF8", "GIF", _IMAGES),
    (b"\x89HDF\r\n", "HDF5", _OWN),
    (b"SQLite format 3\x00", "SQLite", _OWN),
    (b"%PDF-", "PDF", "take the text out of it first"),
)


def format_of(head: bytes) -> tuple[str, str] | None:
    """The format of a file with these first bytes, and what to do with it; None: it may be text."""
    for magic, name, remedy in _MAGIC:
        if head.startswith(magic):
            return name, remedy
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP", _IMAGES
    if head[257:262] == b"ustar":
        return "a tar archive", "say data.kind: shards, if it is WebDataset's, or unpack it first"
    if len(head) > 9 and head[8:10] == b'{"' and 2 <= struct.unpack("<Q", head[:8])[0] < 1 << 27:
        return "safetensors", "weights are named by initial_weights"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and _is_pickle(head):
        return "a pickle", _OWN
    return None


def _is_pickle(head: bytes) -> bool:
    return head[2:3] in (b"\x95", b"}", b"]", b"(", b"c", b"K", b"X", b"\x8a")


def refuse_binary(files: Sequence[SourceFile], source: str, kind: str, key: str) -> None:
    """Refuses files of another format than the kind's.

    Raises:
        BadData: One is a container; the text names its format and the kind that reads it.
    """
    if source.startswith(STDLIB):
        return
    for file in files:
        if found := format_of(file.head(HEAD_BYTES)):
            name, remedy = found
            raise BadData(f"{key} {source}: {file.name} is {name}, which kind {kind} does not read; {remedy}")
