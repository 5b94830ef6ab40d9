"""From a source to its file of tokens, which is made once and never whole in memory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bus.logs import get_logger
from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from workers.data.source_files import SourceFile
from workers.data.text import token_file
from workers.data.text.chat import ChatReader
from workers.data.text.documents import (
    PIECE_CHARACTERS,
    BadDocument,
    TextPiece,
    read_texts,
    refuse_mixture,
)
from workers.data.text.token_cache import TokenCache, TokenCacheConfig
from workers.data.text.token_file import TokenFile, TokenFileWriter
from workers.data.text.tokenizer import TextTokenizer, naming_failures

log = get_logger("data")

_BATCH_CHARACTERS = 1 << 20
_BATCH_TEXTS = 1024
_FOLDER = "tokens"


class Corpus:
    """What a file of tokens is made of.

    Args:
        files: The source.
        tokenizer: Makes the ids.
        fields: The source's text fields of the job.
        chat: Renders conversations; None: documents are texts.

    Raises:
        BadData: The files are of several kinds, or the tokenizer has no end-of-document token.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        tokenizer: TextTokenizer,
        fields: SourceSpec,
        chat: ChatReader | None,
    ) -> None:
        refuse_mixture(files, fields)
        self._files = files
        self._tokenizer = tokenizer
        self._fields = fields
        self._chat = chat
        self._stops = fields.on_bad_document == "stop" and fields.packing_of(fields.kind) != "none"
        self.eos = None if chat is not None or self._ends_itself() else tokenizer.eos_id(fields.eos)

    def _ends_itself(self) -> bool:
        """Whether the tokenizer's own special tokens end a document, as [SEP] does."""
        if self._fields.eos != "auto" or not self._fields.special_tokens:
            return False
        ids = self._tokenizer.encode(["a"], special_tokens=True)[0]
        return len(ids) > 0 and int(ids[-1]) in self._tokenizer.special_ids()

    @property
    def key(self) -> str:
        """What the file is found by: changes with all that decides its content, as seen from outside."""
        fields = self._fields
        parts = {
            "version": token_file.VERSION,
            "piece": PIECE_CHARACTERS,
            "files": [[file.identity(), _changed_at(file)] for file in self._files],
            "tokenizer": [
                self._tokenizer.digest,
                self._tokenizer.library_version,
                self._tokenizer.vocabulary,
            ],
            "fields": [fields.kind, fields.format, fields.field, fields.encoding, fields.separator],
            "special": [self.eos, fields.special_tokens],
            "chat": self._chat.digest if self._chat is not None else "",
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]

    def open(self, shared: Path | None, own: Path) -> TokenFile:
        """Its file of tokens, from the node's folder, or made there now.

        Args:
            shared: The part of the node's cache for this job's user; None: there is none.
            own: A folder of this process alone, if the shared one is not there or can't be written.

        Raises:
            BadData: The source can't be read as what the job says.
            Unavailable: It can't be read now.
        """
        key = self.key
        if shared is not None:
            try:
                return TokenCache(shared / _FOLDER, TokenCacheConfig.within(shared)).get(key, self.write)
            except OSError as error:
                log.warning("the cache takes no tokens: this process makes its own", reason=str(error))
        try:
            return TokenCache(own).get(key, self.write)
        except OSError as error:
            raise self._no_room(own, error) from None

    def _no_room(self, folder: Path, error: OSError) -> BadData:
        source = sum(file.size for file in self._files)
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        return BadData(
            f"the tokens of {source:,} bytes of text can't be written to {folder}: {error.strerror or error} "
            f"({free:,} bytes are free there)"
        )

    def write(self, folder: Path) -> None:
        """Makes the file of tokens in an empty folder."""
        with TokenFileWriter(
            folder, self._tokenizer.vocabulary, with_counted=self._chat is not None
        ) as writer:
            empty = self._write_conversations(writer) if self._chat else self._write_texts(writer)
            account = writer.finish(
                empty_documents=empty,
                files=len(self._files),
                source_bytes=sum(file.size for file in self._files),
                made_by=self._tokenizer.library_version,
            )
        log.info(
            "tokens written", documents=account.documents, tokens=account.tokens, bad=account.bad_documents
        )

    def _write_texts(self, writer: TokenFileWriter) -> int:
        empty = 0
        for pieces in _batches(read_texts(self._files, self._fields)):
            texts = [piece.text for piece in pieces if isinstance(piece, TextPiece)]
            with naming_failures(self._tokenizer, pieces[0].place):
                ids = iter(self._tokenizer.encode(texts, special_tokens=self._fields.special_tokens))
            for piece in pieces:
                if isinstance(piece, BadDocument):
                    self._note(piece, writer)
                    continue
                writer.add(next(ids))
                if piece.ends and writer.in_document and self.eos is not None:
                    writer.add(np.array([self.eos], np.uint32))
                if piece.ends and not writer.end_document():
                    empty += 1
        return empty

    def _write_conversations(self, writer: TokenFileWriter) -> int:
        assert self._chat is not None
        for found in self._chat.conversations(self._files, self._tokenizer, self._fields):
            if isinstance(found, BadDocument):
                self._note(found, writer)
            else:
                writer.add(found.ids, found.counted)
                writer.end_document()
        return 0

    def _note(self, bad: BadDocument, writer: TokenFileWriter) -> None:
        if self._stops:
            raise BadData(stopped_at(f"{bad.place}: {bad.reason}"))
        writer.bad_document(bad.place, bad.reason)


def stopped_at(document: str) -> str:
    """What is said of a document that can't be read, where none may be missing."""
    return f"{document}; data.on_bad_document: skip leaves such documents out"


def _batches(pieces: Iterator[TextPiece | BadDocument]) -> Iterator[list[TextPiece | BadDocument]]:
    """Pieces in batches, each of about `_BATCH_CHARACTERS`, that the library makes ids of in parallel."""
    batch: list[TextPiece | BadDocument] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text) if isinstance(piece, TextPiece) else 0
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _changed_at(file: SourceFile) -> int:
    """When a local file was changed last: its ends alone would not tell."""
    return file.local.stat().st_mtime_ns if file.local is not None else 0


def bound_parallelism(threads: int) -> None:
    """Has the library of tokenizers use this many threads; it looks once, when it is first used."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
