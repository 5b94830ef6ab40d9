"""Tokens of documents, and the windows that they are packed into, as files of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from schemas.data_set.assembly import INDEX, token_dtype
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.step_args import PackArgs, TokenizeArgs
from schemas.errors import BadData
from workers.data.data_set.shard_file import write_index
from workers.data.text.corpus import bound_parallelism
from workers.data.text.packing import BestFitPacking, WholePacking
from workers.data.text.tokenizer import Ids, TextTokenizer, naming_failures, open_tokenizer

_COPIED_TOKENS = 1 << 20


class BuildTokenizer:
    """The tokenizer of a build, and what stands behind each document.

    Args:
        tokenizer: The library's.
        options: The arguments of `tokenize`.
    """

    def __init__(self, tokenizer: TextTokenizer, options: TokenizeArgs) -> None:
        self._tokenizer = tokenizer
        self._special = options.special_tokens
        ends_itself = options.eos == "auto" and options.special_tokens and _ends_documents(tokenizer)
        self._eos = None if ends_itself else tokenizer.eos_id(options.eos)
        self.dtype = np.dtype(token_dtype(tokenizer.vocabulary)).newbyteorder("<")

    @classmethod
    def of(cls, spec: DataBuildSpec, fetched: Mapping[str, Path] = {}) -> BuildTokenizer:
        """That of a build with the step tokenize.

        Raises:
            BadData: It can't be opened, or has no end-of-document token.
        """
        number, step = next((n, step) for n, step in enumerate(spec.steps) if step.function == "tokenize")
        assert step.tokenizer is not None
        bound_parallelism(1)  # units are what is done at a time
        options = cast(TokenizeArgs, step.options)
        try:
            return cls(open_tokenizer(step.tokenizer, options.eos, fetched), options)
        except BadData as error:
            text = error.text.replace("data.tokenizer", "tokenizer").replace("data.eos", "args.eos")
            raise BadData(f"steps[{number}] tokenize: {text}") from None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each document, with what ends it.

        Raises:
            BadData: The library fails, or an id lies beyond the vocabulary.
        """
        with naming_failures(self._tokenizer, "a document"):
            found = self._tokenizer.encode(texts, special_tokens=self._special)
        if self._eos is not None:
            end = np.array([self._eos], np.uint32)
            found = [np.concatenate((ids, end)) if len(ids) else ids for ids in found]
        highest = max((int(ids.max()) for ids in found if len(ids)), default=0)
        if highest >= self._tokenizer.vocabulary:
            raise BadData(
                f"the tokenizer gives the id {highest:,}, and its vocabulary has "
                f"{self._tokenizer.vocabulary:,} ids: its special tokens are not in it"
            )
        return found

    def facts(self) -> dict[str, Any]:
        """What results say of it."""
        return {
            "tokenizer_sha256": self._tokenizer.digest,
            "vocabulary": self._tokenizer.vocabulary,
            "pad_id": self._tokenizer.pad_id(),
            "made_by": self._tokenizer.library_version,
        }


def _ends_documents(tokenizer: TextTokenizer) -> bool:
    """Whether the tokenizer's own special tokens end a document, as [SEP] does."""
    ids = tokenizer.encode(["a"], special_tokens=True)[0]
    return len(ids) > 0 and int(ids[-1]) in tokenizer.special_ids()


class FinishedShard(NamedTuple):
    """Files of a shard, and how much is in it; `tokens` are those to be learnt."""

    path: Path
    index_path: Path
    samples: int
    tokens: int
    tokens_left: int


class TokenShard:
    """Documents of one split, one after another.

    Args:
        folder: Where its files go.
        split: Whose they are.
        tokenizer: Decides the type of the tokens.
        files: Closes what is open.
    """

    def __init__(self, folder: Path, split: str, tokenizer: BuildTokenizer, files: ExitStack) -> None:
        self._path = folder / f"{split}-tokens"
        self._target = folder / split
        self._index = folder / f"{split}{INDEX}"
        self._dtype = tokenizer.dtype
        self._file = files.enter_context(self._path.open("wb"))
        self._borders = [0]

    def add(self, ids: Ids) -> None:
        """Adds a document of two tokens or more."""
        self._file.write(ids.astype(self._dtype).tobytes())
        self._borders.append(self._borders[-1] + len(ids))

    def finish(self, spec: DataBuildSpec) -> FinishedShard:
        """Makes the samples. All documents are there, and their file is closed."""
        total, documents = self._borders[-1], len(self._borders) - 1
        if spec.content == "documents":
            write_index(self._index, self._path, self._borders)
            return FinishedShard(self._path, self._index, documents, total - documents, 0)
        options = cast(PackArgs, spec.steps[-1].options)
        if options.how == "concatenate":
            return self._concatenated(total, options.sample_tokens)
        return self._best_fit(total, options.sample_tokens)

    def _concatenated(self, total: int, sample_tokens: int) -> FinishedShard:
        samples = max(0, total - 1) // sample_tokens
        stored = samples * sample_tokens + 1
        if samples:
            with self._path.open("r+b") as file:
                file.truncate(stored * self._dtype.itemsize)
            borders = [border for border in self._borders if border < stored]
            write_index(self._index, self._path, [*borders, stored])
        left = total - stored if samples else total
        return FinishedShard(self._path, self._index, samples, samples * sample_tokens, left)

    def _best_fit(self, total: int, sample_tokens: int) -> FinishedShard:
        if not total:
            return FinishedShard(self._path, self._index, 0, 0, 0)
        offsets = np.array(self._borders, np.uint64)
        packing = BestFitPacking(WholePacking(offsets, sample_tokens, 1, split=True, least=2))
        tokens = np.memmap(self._path, dtype=self._dtype, mode="r")
        borders, firsts, learnt = [0], [0], 0
        with self._target.open("wb", _COPIED_TOKENS) as file:
            for sample in range(len(packing)):
                for part in packing.segments(sample):
                    file.write(tokens[part.start : part.stop + 1].tobytes())
                    borders.append(borders[-1] + part.stop + 1 - part.start)
                    learnt += part.stop - part.start
                firsts.append(len(borders) - 1)
        write_index(self._index, self._target, borders, firsts)
        return FinishedShard(self._target, self._index, len(packing), learnt, 0)
