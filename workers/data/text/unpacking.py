"""The bytes of a source's file as a stream, unpacked if the file is packed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO, cast

from bus.wire.secret_urls import hidden
from schemas.errors import BadData
from workers.data.source_files import SourceFile
from workers.data.text.tokenizer_files import library

_HEAD_BYTES = 512
PACKED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
"""Endings of packed files' names. Which of them a file is, its first bytes say."""


@contextmanager
def unpacked(file: SourceFile) -> Iterator[BinaryIO]:
    """The content of a file that is gzip, zstd, bzip2, xz or neither.

    Raises:
        BadData: It is damaged, or can't be read.
    """
    try:
        with file.open() as raw:
            head = raw.read(_HEAD_BYTES)
            raw.seek(0)
            with closing(_stream(file.name, raw, head)) as stream:
                yield stream
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise BadData(f"{file.name} is damaged: {error}") from None
    except OSError as error:
        raise BadData(f"{file.name} can't be read: {hidden(str(error.strerror or error))}") from None


def first_bytes(file: SourceFile) -> bytes:
    """The first bytes of a file's content."""
    with unpacked(file) as stream:
        return stream.read(_HEAD_BYTES)


def _stream(name: str, raw: BinaryIO, head: bytes) -> BinaryIO:
    if head.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        pyarrow = library("pyarrow", f"{name} (zstd)", key="data.source")
        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")))
    if head.startswith(b"BZh"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if head.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    return raw
