"""A tokenizer of any library, as what training needs of it: ids, a vocabulary, special tokens, a digest."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.errors import BadData, DmscError
from schemas.job_file.text import RANKS, TIKTOKEN
from workers.data.text.tokenizer_files import TokenizerFiles, library, open_tokenizer_files

Ids = npt.NDArray[np.uint32]


class SpecialTokens(NamedTuple):
    """Texts of special tokens, as far as the tokenizer's files name them; empty: none."""

    bos: str = ""
    eos: str = ""
    pad: str = ""
    mask: str = ""


class Piece(NamedTuple):
    """Ids, and for each the half-open range of characters of the text that it stands for."""

    ids: Ids
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


class TextTokenizer(ABC):
    """What all tokenizers have in common.

    Args:
        name: How a job names it.
        digest: SHA-256 of what decides its ids.
        vocabulary: The largest id that it may give, plus one.
        tokens: The special tokens that its files name.
        chat_template: Its own template; empty if it has none.
    """

    def __init__(
        self, name: str, digest: str, vocabulary: int, tokens: SpecialTokens, chat_template: str = ""
    ) -> None:
        self.name = name
        self.digest = digest
        self.vocabulary = vocabulary
        self.tokens = tokens
        self.chat_template = chat_template

    @abstractmethod
    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[Ids]:
        """The ids of each text, with the tokenizer's own special tokens around them or without."""

    @abstractmethod
    def encode_with_ranges(self, text: str) -> Piece:
        """The ids of a text in which special tokens are recognised, and their ranges in it."""

    @abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of a token, by its text."""

    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; bytes that are no character are U+FFFD."""

    @property
    @abstractmethod
    def library_version(self) -> str:
        """The library that makes the ids, with its version; part of what names a file of tokens."""

    def known_id(self, token: str, key: str) -> int:
        """The id of a token that a job names.

        Raises:
            BadData: There is no such token.
        """
        found = self.id_of(token)
        if found is None:
            raise BadData(f"data.{key}: the tokenizer {self.name} has no token {token!r}")
        return found

    def eos_id(self, eos: str) -> int | None:
        """The id behind each document, by the job's `data.eos`.

        Raises:
            BadData: There is no such token, or nothing says which one it is.
        """
        if eos == "none":
            return None
        if eos != "auto":
            return self.known_id(eos, "eos")
        if self.tokens.eos:
            return self.known_id(self.tokens.eos, "eos")
        found = next((token for token in _USUAL_EOS if self.id_of(token) is not None), None)
        if found is None:
            raise BadData(
                f"data.tokenizer {self.name} names no end-of-document token; name the tokenizer's folder, if "
                "it has a tokenizer_config.json, or give data.eos: TOKEN, or none to join documents without"
            )
        return self.id_of(found)

    def pad_id(self) -> int:
        """The id of padding: nothing is learnt from it, so that any id will do where none is named."""
        for token in (self.tokens.pad, "<pad>", "[PAD]", "<|padding|>", self.tokens.eos, *_USUAL_EOS):
            if token and (found := self.id_of(token)) is not None:
                return found
        return 0

    def mask_id(self) -> int:
        """The id that stands for a token to be restored.

        Raises:
            BadData: There is none.
        """
        for token in (self.tokens.mask, "[MASK]", "<mask>"):
            if token and (found := self.id_of(token)) is not None:
                return found
        raise BadData(
            f"data.targets: masked needs a mask token, and the tokenizer {self.name} has neither [MASK] nor "
            "<mask> nor names another one"
        )

    def sentinel_ids(self) -> list[int]:
        """The ids of `<extra_id_0>`, `<extra_id_1>` …, as far as there are such tokens."""
        found: list[int] = []
        while (sentinel := self.id_of(f"<extra_id_{len(found)}>")) is not None:
            found.append(sentinel)
        return found


_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class ByteTokenizer(TextTokenizer):
    """Bytes of UTF-8 as ids; with an end-of-document token, whatever its text, that is 256."""

    def __init__(self, eos: str = "none") -> None:
        self._eos = "" if eos in ("none", "auto") else eos
        tokens = SpecialTokens(eos=self._eos)
        super().__init__("bytes", hashlib.sha256(b"bytes").hexdigest(), 256 + bool(self._eos), tokens)

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def encode_with_ranges(self, text: str) -> Piece:
        ids = self.encode([text], special_tokens=False)[0]
        starts = np.cumsum((ids & 0xC0) != 0x80, dtype=np.int64) - 1
        return Piece(ids, starts, starts + 1)

    def id_of(self, token: str) -> int | None:
        return 256 if self._eos and token == self._eos else None

    def eos_id(self, eos: str) -> int | None:
        return None if eos in ("none", "auto") else 256

    def special_ids(self) -> frozenset[int]:
        return frozenset({256} if self._eos else ())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(id for id in ids if id < 256).decode(errors="replace")

    @property
    def library_version(self) -> str:
        return "bytes"


class JsonTokenizer(TextTokenizer):
    """A `tokenizer.json`, by the library tokenizers; its padding, truncation and dropout are switched off."""

    def __init__(self, name: str, content: bytes, tokens: SpecialTokens, chat_template: str = "") -> None:
        tokenizers = library("tokenizers", name)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except BaseException as error:  # the library raises bare Exceptions, and panics
            _raise_others(error)
            raise BadData(f"data.tokenizer {name} is not a tokenizer.json: {first_line(error)}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # ids must be a function of the text alone
        self._version = f"tokenizers {tokenizers.__version__}"
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest < 0:
            raise BadData(f"data.tokenizer {name} has an empty vocabulary")
        super().__init__(name, hashlib.sha256(content).hexdigest(), highest + 1, tokens, chat_template)

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[Ids]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def encode_with_ranges(self, text: str) -> Piece:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ranges = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return Piece(np.array(encoding.ids, np.uint32), ranges[:, 0], ranges[:, 1])

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def special_ids(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return found

    @property
    def library_version(self) -> str:
        return self._version


class SentencePieceTokenizer(TextTokenizer):
    """A sentencepiece `.model`; it never samples."""

    def __init__(self, name: str, content: bytes, tokens: SpecialTokens, chat_template: str = "") -> None:
        sentencepiece = library("sentencepiece", name)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except Exception as error:
            raise BadData(
                f"data.tokenizer {name} is not a sentencepiece model: {first_line(error)}"
            ) from None
        self._version = f"sentencepiece {sentencepiece.__version__}"
        vocabulary = self._processor.vocab_size()
        if not vocabulary:
            raise BadData(f"data.tokenizer {name} is not a sentencepiece model: it has no pieces")
        own = SpecialTokens(*(self._own(id) for id in ("bos_id", "eos_id", "pad_id")))
        merged = SpecialTokens(*(given or mine for given, mine in zip(tokens, own, strict=True)))
        super().__init__(name, hashlib.sha256(content).hexdigest(), vocabulary, merged, chat_template)
        controls = (id for id in range(vocabulary) if self._processor.is_control(id))
        self._controls = {self._processor.id_to_piece(id): id for id in controls}
        self._control = re.compile(f"({'|'.join(map(re.escape, self._controls)) or '(?!)'})")

    def _own(self, method: str) -> str:
        found = getattr(self._processor, method)()
        return self._processor.id_to_piece(found) if found >= 0 else ""

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[Ids]:
        found = self._processor.encode(list(texts), add_bos=special_tokens, add_eos=False, num_threads=1)
        return [np.array(ids, np.uint32) for ids in found]

    def encode_with_ranges(self, text: str) -> Piece:
        ids: list[int] = []
        ranges: list[tuple[int, int]] = []
        place = 0
        for part in self._control.split(text):
            if part in self._controls:  # the library gives its own control tokens to no text
                ids.append(self._controls[part])
                ranges.append((place, place + len(part)))
            elif part:
                found = self._processor.encode_as_offset_mapping(part)
                ids += found["ids"]
                ranges += [(place + start, place + end) for start, end in found["offsets"]]
            place += len(part)
        borders = np.array(ranges, np.int64).reshape(-1, 2)
        return Piece(np.array(ids, np.uint32), borders[:, 0], borders[:, 1])

    def id_of(self, token: str) -> int | None:
        found: int = self._processor.piece_to_id(token)
        return found if self._processor.id_to_piece(found) == token else None

    def special_ids(self) -> frozenset[int]:
        processor = self._processor
        return frozenset(
            id for id in range(self.vocabulary) if processor.is_control(id) or processor.is_unknown(id)
        )

    def decode(self, ids: Sequence[int]) -> str:
        controls = set(self._controls.values())
        known = [id for id in ids if id < self.vocabulary and id not in controls]
        found: str = self._processor.decode(known)
        return found

    @property
    def library_version(self) -> str:
        return self._version


class TiktokenTokenizer(TextTokenizer):
    """An encoding of tiktoken, by name or by its file of ranks, whose name is the encoding's."""

    def __init__(self, name: str, encoding: Any, digest: str) -> None:
        self._encoding = encoding
        self._version = f"tiktoken {library('tiktoken', name).__version__}"
        eos = next((token for token in _USUAL_EOS if token in encoding.special_tokens_set), "")
        super().__init__(name, digest, encoding.max_token_value + 1, SpecialTokens(eos=eos))

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[Ids]:
        found = self._encoding.encode_ordinary_batch(list(texts), num_threads=1)
        return [np.array(ids, np.uint32) for ids in found]

    def encode_with_ranges(self, text: str) -> Piece:
        ids = self._encoding.encode(text, allowed_special="all")
        whole, starts = self._encoding.decode_with_offsets(ids)
        ends = np.array([*starts[1:], len(whole)], np.int64)
        return Piece(np.array(ids, np.uint32), np.array(starts, np.int64), ends)

    def id_of(self, token: str) -> int | None:
        try:
            found: int = self._encoding.encode_single_token(token)
        except KeyError:
            return None
        return found

    def special_ids(self) -> frozenset[int]:
        return frozenset(
            self._encoding.encode_single_token(each) for each in self._encoding.special_tokens_set
        )

    def decode(self, ids: Sequence[int]) -> str:
        special = self.special_ids()
        found: str = self._encoding.decode([id for id in ids if id not in special], errors="replace")
        return found

    @property
    def library_version(self) -> str:
        return self._version


def open_tokenizer(name: str, eos: str = "auto", fetched: Mapping[str, Path] = {}) -> TextTokenizer:
    """The tokenizer that a job names.

    Args:
        name: `data.tokenizer`.
        eos: `data.eos`, which gives the tokenizer `bytes` one more id.
        fetched: `bus://` URL → file.

    Raises:
        BadData: There is none, it is none, or its library is not installed.
    """
    if name == "bytes":
        return ByteTokenizer(eos)
    if name.startswith(TIKTOKEN):
        return _tiktoken(name)
    if name.endswith(RANKS):
        return _ranks_file(name, fetched)
    files = open_tokenizer_files(name, fetched)
    if files.json is not None:
        return JsonTokenizer(name, files.json, _special(files.config), files.chat_template)
    if files.sentencepiece is not None:
        return SentencePieceTokenizer(name, files.sentencepiece, _special(files.config), files.chat_template)
    raise BadData(_not_one(name, files))


def _not_one(name: str, files: TokenizerFiles) -> str:
    if files.names:
        return (
            f"data.tokenizer {name} has neither a tokenizer.json nor a sentencepiece model, but "
            f"{', '.join(files.names[:5])}; save one with AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    return (
        f"data.tokenizer {name} is neither a tokenizer.json nor a sentencepiece model; a file of "
        f"tiktoken's ranks has the name of its encoding, as cl100k_base{RANKS}"
    )


def _special(config: Mapping[str, Any]) -> SpecialTokens:
    def text(key: str) -> str:
        token = config.get(f"{key}_token")
        return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")

    return SpecialTokens(text("bos"), text("eos"), text("pad"), text("mask"))


def _tiktoken(name: str) -> TiktokenTokenizer:
    """An encoding by its name, whose ranks the library fetches, unless its own cache has them."""
    tiktoken = library("tiktoken", name)
    given, known = name.removeprefix(TIKTOKEN), _encodings(name)
    if given not in known:
        raise BadData(f"data.tokenizer {name}: tiktoken knows no {given!r}, but {', '.join(sorted(known))}")
    try:
        encoding = tiktoken.get_encoding(given)
    except Exception as error:  # the network's, of whatever client it used
        raise BadData(
            f"data.tokenizer {name}: its ranks can't be fetched ({type(error).__name__}); give their file, "
            f"as /path/{given}{RANKS}"
        ) from None
    ranks = sorted((rank, token.hex()) for token, rank in encoding._mergeable_ranks.items())
    return TiktokenTokenizer(name, encoding, hashlib.sha256(json.dumps([given, ranks]).encode()).hexdigest())


def _ranks_file(name: str, fetched: Mapping[str, Path]) -> TiktokenTokenizer:
    """The encoding whose name a file of ranks has."""
    stem, known = PurePosixPath(name).name.removesuffix(RANKS), _encodings(name)
    if stem not in known:
        raise BadData(
            f"data.tokenizer {name}: a file of ranks has the name of its encoding, as cl100k_base{RANKS}; "
            f"tiktoken knows {', '.join(sorted(known))}"
        )
    content = open_tokenizer_files(name, fetched).content
    digest = hashlib.sha256(content + stem.encode()).hexdigest()
    return TiktokenTokenizer(name, _of_ranks(name, stem, content), digest)


def _encodings(name: str) -> Mapping[str, Any]:
    known: Mapping[str, Any] = library("tiktoken_ext.openai_public", name).ENCODING_CONSTRUCTORS
    return known


def _of_ranks(name: str, stem: str, content: bytes) -> Any:
    """The encoding that the library defines under this name, with these ranks in place of downloaded ones."""
    import base64

    tiktoken = library("tiktoken", name)
    public = library("tiktoken_ext.openai_public", name)
    try:
        ranks = {
            base64.b64decode(key): int(rank) for key, rank in map(bytes.split, content.splitlines()) if key
        }
        with _replaced(public, ranks):
            definition = public.ENCODING_CONSTRUCTORS[stem]()
        return tiktoken.Encoding(**definition)
    except (ValueError, AssertionError, TypeError):
        raise BadData(f"data.tokenizer {name} is not the file of ranks of {stem}") from None


@contextmanager
def _replaced(public: Any, ranks: dict[bytes, int]) -> Iterator[None]:
    before = public.load_tiktoken_bpe, public.data_gym_to_mergeable_bpe_ranks
    public.load_tiktoken_bpe = public.data_gym_to_mergeable_bpe_ranks = lambda *_, **__: dict(ranks)
    try:
        yield
    finally:
        public.load_tiktoken_bpe, public.data_gym_to_mergeable_bpe_ranks = before


def _raise_others(error: BaseException) -> None:
    """Raises what is neither an Exception nor a panic of a library in Rust, which is no Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


@contextmanager
def naming_failures(tokenizer: TextTokenizer, place: str) -> Iterator[None]:
    """Turns whatever a library raises about a text into one line.

    Raises:
        BadData: It did.
    """
    try:
        yield
    except DmscError:
        raise
    except BaseException as error:
        _raise_others(error)
        raise BadData(f"data.tokenizer {tokenizer.name} fails at {place}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """What an error says, without what it shows."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
