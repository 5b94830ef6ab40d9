"""Tokens of a corpus on disk: a folder with mapped arrays, and a digest of their content.

tokens.bin    (tokens,) uint16 or uint32, little-endian, one document after the other
offsets.bin   (documents + 1,) uint64: document i is tokens[offsets[i]:offsets[i + 1]]
counted.bin   (tokens,) uint8, only for conversations: 1 for tokens that are targets
bad.json      [[document, place, reason], …] of documents that could not be read: they have no tokens
tokens.json   counts, digests, what it was made of
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.errors import BadData
from workers.data.text.tokenizer import Ids

VERSION = 1
_HASHED_AT_ONCE = 1 << 23
_MOST_BAD = 100_000
_TOKENS, _OFFSETS, _COUNTED, _BAD = "tokens.bin", "offsets.bin", "counted.bin", "bad.json"
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


class TokenFile:
    """A mapped file of tokens. Close it, or leave it to the end of the process."""

    def __init__(self, folder: Path, account: TokenAccount) -> None:
        self.folder = folder
        self.account = account
        self.tokens: npt.NDArray[Any] = _mapped(folder / _TOKENS, account.dtype, account.tokens)
        self.offsets: npt.NDArray[np.uint64] = _mapped(folder / _OFFSETS, "uint64", account.documents + 1)
        self.counted: npt.NDArray[np.uint8] | None = (
            _mapped(folder / _COUNTED, "uint8", account.tokens) if account.counted else None
        )
        self.bad: dict[int, str] = {
            document: f"{place}: {reason}"
            for document, place, reason in json.loads((folder / _BAD).read_bytes())
        }

    @classmethod
    def open(cls, folder: Path) -> TokenFile:
        """Maps a file of tokens once its content has been compared with its digest.

        Raises:
            DamagedTokenFile: It is missing, or not as written.
        """
        try:
            account = TokenAccount(**json.loads((folder / _ACCOUNT).read_bytes()))
            if account.version != VERSION or _digest(folder, account.counted) != account.digest:
                raise DamagedTokenFile(str(folder))
            return cls(folder, account)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DamagedTokenFile(f"{folder}: {error}") from None


def _mapped(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    if not count:
        return np.empty(0, kind)  # an empty file can't be mapped
    return np.memmap(path, dtype=kind, mode="r", shape=(count,))


def _digest(folder: Path, counted: bool) -> str:
    whole = hashlib.sha256()
    for name in (_TOKENS, _OFFSETS, _BAD, *((_COUNTED,) if counted else ())):
        whole.update(_file_digest(folder / name))
    return whole.hexdigest()


def _file_digest(path: Path) -> bytes:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASHED_AT_ONCE):
            content.update(piece)
    return content.digest()


@dataclass
class TokenFileWriter:
    """Writes a file of tokens into an existing folder, document by document.

    Args:
        folder: Empty.
        vocabulary: The largest id, plus one: up to 65,536 an id takes two bytes, else four.
        counted: Whether each token says if it is a target.
    """

    folder: Path
    vocabulary: int
    counted: bool = False
    tokens: int = 0
    documents: int = 0
    _open: ExitStack = field(default_factory=ExitStack)
    _files: dict[str, Any] = field(default_factory=dict)
    _in_document: int = 0
    _bad: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 1 << 16 else "uint32"

    def __enter__(self) -> TokenFileWriter:
        for name in (_TOKENS, _OFFSETS, *((_COUNTED,) if self.counted else ())):
            self._files[name] = self._open.enter_context((self.folder / name).open("wb", 1 << 20))
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
        self._in_document += len(ids)

    def end_document(self) -> bool:
        """Ends the document at hand; false if it has no token, and is left out."""
        if not self._in_document:
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
        self._in_document = 0
        self.documents += 1
        self._files[_OFFSETS].write(self.tokens.to_bytes(8, "little"))

    @property
    def in_document(self) -> int:
        """Tokens of the document at hand."""
        return self._in_document

    def finish(self, **account: Any) -> TokenAccount:
        """Writes the account, and with it the digest."""
        self._open.close()
        (self.folder / _BAD).write_text(json.dumps(self._bad))
        whole = TokenAccount(
            digest=_digest(self.folder, self.counted),
            dtype=self.dtype,
            tokens=self.tokens,
            documents=self.documents,
            counted=self.counted,
            bad_documents=len(self._bad),
            **account,
        )
        (self.folder / _ACCOUNT).write_text(json.dumps(asdict(whole)))
        return whole


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.iterdir():
        yield path.stat().st_size
