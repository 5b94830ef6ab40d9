"""Tokens of a corpus on disk: a folder with mapped arrays, and digests of their content.

    tokens.bin    (tokens,) uint16 or uint32, little-endian, one document after the other
    counted.bin   (tokens,) uint8, only for conversations: 1 for tokens that are targets
    offsets.bin   (documents + 1,) uint64: document i is tokens[offsets[i]:offsets[i + 1]]
    bad.json      [[document, place, reason], …] of documents that could not be read: they have no tokens
    blocks.bin    a BLAKE2b of each block of tokens.bin, then of counted.bin
    tokens.json   counts, and the digest of all of the above

Whoever opens it reads all but the first two. A block of those is compared with its digest when it is first
used: an instance in place of a killed one does not have to read 100 GB before its first sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.errors import BadData, Unavailable
from workers.data.text.tokenizer import Ids

VERSION = 1
BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16
_MOST_BAD = 100_000
_TOKENS, _COUNTED, _OFFSETS, _BAD, _BLOCKS = (
    "tokens.bin",
    "counted.bin",
    "offsets.bin",
    "bad.json",
    "blocks.bin",
)
_ACCOUNT = "tokens.json"


@dataclass(frozen=True, kw_only=True)
class TokenAccount:
    """What a file of tokens holds, and what was left out of it.

    Attributes:
        digest: SHA-256 of the arrays: tokens, borders of documents, which tokens count, bad documents.
        dtype: Of the tokens.
        documents: Those with tokens, and the bad ones.
        bad_documents: Those that could not be read.
        empty_documents: Those without a token, which are left out.
        made_by: Library and version that made the ids.
    """

    digest: str = ""
    version: int = VERSION
    dtype: str = "uint16"
    tokens: int = 0
    documents: int = 0
    source_bytes: int = 0
    files: int = 0
    empty_documents: int = 0
    bad_documents: int = 0
    made_by: str = ""
    counted: bool = False


class DamagedTokenFile(Exception):
    """The folder holds no file of tokens, or not the one that was written."""


class CheckedArray:
    """A mapped array whose blocks are compared with their digests before they are first used.

    Args:
        path: The file.
        dtype: Of the elements, little-endian.
        count: Elements.
        digests: Of its blocks, one after the other.
    """

    def __init__(self, path: Path, dtype: str, count: int, digests: bytes) -> None:
        self._path = path
        self._bytes = _mapped(path, "uint8", count * np.dtype(dtype).itemsize)
        self._elements = self._bytes.view(np.dtype(dtype).newbyteorder("<"))
        self._digests = digests
        self._unchecked = np.ones(-(-len(self._bytes) // BLOCK_BYTES), bool)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Elements [start, stop); a view.

        Raises:
            Unavailable: They are not as written: the file was put away, and is made again when it is opened.
        """
        size = self._elements.itemsize
        first, last = start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)
        if self._unchecked[first:last].any():
            for block in range(first, last):
                self._check(block)
        return self._elements[start:stop]

    def _check(self, block: int) -> None:
        content = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        expected = self._digests[block * _DIGEST_BYTES : (block + 1) * _DIGEST_BYTES]
        if _block_digest(content.data) != expected:
            folder = self._path.parent
            with contextlib.suppress(OSError):
                folder.rename(folder.with_name(f"{folder.name}.new-{secrets.token_hex(4)}"))
            raise Unavailable(f"{self._path} was damaged on disk: its tokens are made again")
        self._unchecked[block] = False


class TokenFile:
    """A mapped file of tokens.

    Attributes:
        account: What is in it.
        tokens: (tokens,) ids.
        counted: (tokens,) 1 for targets; None: all are.
        offsets: (documents + 1,) borders of documents.
        bad: Document → where it is, and why it could not be read.
    """

    def __init__(self, folder: Path, account: TokenAccount) -> None:
        self.folder = folder
        self.account = account
        digests = (folder / _BLOCKS).read_bytes()
        own = _block_count(account.tokens * np.dtype(account.dtype).itemsize) * _DIGEST_BYTES
        self.tokens = CheckedArray(folder / _TOKENS, account.dtype, account.tokens, digests[:own])
        self.counted = (
            CheckedArray(folder / _COUNTED, "uint8", account.tokens, digests[own:])
            if account.counted
            else None
        )
        self.offsets: npt.NDArray[np.uint64] = _mapped(folder / _OFFSETS, "uint64", account.documents + 1)
        self.bad: dict[int, str] = {
            document: f"{place}: {reason}"
            for document, place, reason in json.loads((folder / _BAD).read_bytes())
        }

    @classmethod
    def open(cls, folder: Path) -> TokenFile:
        """Maps a file of tokens, once all but the tokens has been compared with the digest.

        Raises:
            DamagedTokenFile: It is missing, or not as written.
        """
        try:
            account = TokenAccount(**json.loads((folder / _ACCOUNT).read_bytes()))
            if account.version != VERSION or _digest(folder, account) != account.digest:
                raise DamagedTokenFile(str(folder))
            return cls(folder, account)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DamagedTokenFile(f"{folder}: {error}") from None


def _mapped(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    if not count:
        return np.empty(0, kind)  # an empty file can't be mapped
    return np.memmap(path, dtype=kind, mode="r", shape=(count,))


def _digest(folder: Path, account: TokenAccount) -> str:
    whole = hashlib.sha256(f"{account.version} {account.dtype} {account.tokens} {account.counted}".encode())
    for name in (_BLOCKS, _OFFSETS, _BAD):
        with (folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def _block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _block_digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _block_digests(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield _block_digest(block)


@dataclass
class TokenFileWriter:
    """Writes a file of tokens into an existing folder, document by document.

    Args:
        folder: Empty.
        vocabulary: The largest id, plus one: up to 65,536 an id takes two bytes, else four.
        with_counted: Whether each token says if it is a target.
    """

    folder: Path
    vocabulary: int
    with_counted: bool = False
    tokens: int = 0
    documents: int = 0
    in_document: int = 0
    """Tokens of the document at hand."""
    _open: ExitStack = field(default_factory=ExitStack)
    _files: dict[str, Any] = field(default_factory=dict)
    _bad: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 1 << 16 else "uint32"

    @property
    def _arrays(self) -> tuple[str, ...]:
        return (_TOKENS, _COUNTED) if self.with_counted else (_TOKENS,)

    def __enter__(self) -> TokenFileWriter:
        for name in (*self._arrays, _OFFSETS):
            self._files[name] = self._open.enter_context((self.folder / name).open("wb", BLOCK_BYTES))
        self._files[_OFFSETS].write(bytes(8))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, ids: Ids, counted: npt.NDArray[np.bool_] | None = None) -> None:
        """Adds tokens to the document at hand.

        Raises:
            BadData: An id lies beyond the vocabulary.
        """
        if len(ids) and (highest := int(ids.max())) >= self.vocabulary:
            raise BadData(
                f"the tokenizer gives the id {highest:,}, and its vocabulary has {self.vocabulary:,} ids: "
                "its special tokens are not in it"
            )
        self._files[_TOKENS].write(ids.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes())
        if counted is not None:
            self._files[_COUNTED].write(counted.astype(np.uint8).tobytes())
        self.tokens += len(ids)
        self.in_document += len(ids)

    def end_document(self) -> bool:
        """Ends the document at hand; false if it has no token, and is left out."""
        if not self.in_document:
            return False
        self._end()
        return True

    def bad_document(self, place: str, reason: str) -> None:
        """Notes a document that can't be read.

        Raises:
            BadData: There are too many.
        """
        if len(self._bad) == _MOST_BAD:
            first = f"{self._bad[0][1]}: {self._bad[0][2]}"
            raise BadData(f"more than {_MOST_BAD:,} documents can't be read; the first: {first}")
        self._bad.append((self.documents, place, reason))
        self._end()

    def _end(self) -> None:
        self.in_document = 0
        self.documents += 1
        self._files[_OFFSETS].write(self.tokens.to_bytes(8, "little"))

    def finish(self, **account: Any) -> TokenAccount:
        """Writes the digests and the account."""
        self._open.close()
        (self.folder / _BAD).write_text(json.dumps(self._bad))
        with (self.folder / _BLOCKS).open("wb") as blocks:
            for name in self._arrays:
                blocks.writelines(_block_digests(self.folder / name))
        whole = TokenAccount(
            dtype=self.dtype,
            tokens=self.tokens,
            documents=self.documents,
            counted=self.with_counted,
            bad_documents=len(self._bad),
            **account,
        )
        whole = replace(whole, digest=_digest(self.folder, whole))
        (self.folder / _ACCOUNT).write_text(json.dumps(asdict(whole)))
        return whole


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())
