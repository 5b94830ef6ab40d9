"""Samples of text: tokens of one or more documents, and what is to be learnt from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from workers.data.samples import UnreadableSample
from workers.data.text.packing import DocumentSlice, SamplePacking
from workers.data.text.token_file import TokenFile

IGNORED = -100
"""The target of a position that is not to be learnt: `ignore_index` of PyTorch's cross entropy."""

Tokens = npt.NDArray[np.int64]
Values = dict[str, npt.NDArray[Any]]
ReadTokens = Callable[[int, int], npt.NDArray[Any]]
Mask = Literal["none", "padding", "documents"]


@dataclass(frozen=True, kw_only=True)
class SampleForm:
    """What a sample consists of.

    Attributes:
        pad: The id of padding.
        shifted: Whether targets are the inputs one token later; else they are the inputs.
        within_documents: Whether documents of a sample are separated.
        mask: The form of `attention_mask`, if there is one.
        pad_to_longest: Whether a batch is only as long as its longest sample.
        vocabulary: Of the tokenizer: the largest id plus one.
    """

    pad: int
    shifted: bool = True
    within_documents: bool = False
    mask: Mask = "none"
    pad_to_longest: bool = False
    vocabulary: int = 256


class PackedSamples:
    """Documents' tokens, some of which make a sample.

    Args:
        file: All tokens.
        packing: Which of them make a sample.
        form: What a sample consists of.

    Attributes:
        vocabulary: The largest id that the tokenizer may give, plus one.
        digest: SHA-256 of all that decides the samples.
    """

    def __init__(self, file: TokenFile, packing: SamplePacking, form: SampleForm, *more: object) -> None:
        self._file = file
        self.packing = packing
        self._form = form
        self.sample_tokens = packing.sample_tokens
        self.vocabulary = form.vocabulary
        parts = [file.account.digest, type(packing).__name__, packing.sample_tokens, len(packing)]
        self.digest = hashlib.sha256(repr([*parts, form, *more]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.packing)

    def close(self) -> None:
        """Nothing to do: what is mapped ends with the last sample of it."""

    def segments(self, index: int) -> list[DocumentSlice]:
        """The tokens of a sample, by document.

        Raises:
            UnreadableSample: Its document could not be read.
        """
        found = self.packing.segments(index)
        if found[0].start == found[0].stop:
            document = found[0].document
            raise UnreadableSample(self._file.bad.get(document, f"document {document + 1:,} has no tokens"))
        return found

    def inputs(self, segments: Sequence[DocumentSlice], length: int) -> Values:
        """What the model sees, without what it is to say."""
        return input_values(self._file.tokens.read, segments, length, self._form)


def input_values(
    read: ReadTokens, segments: Sequence[DocumentSlice], length: int, form: SampleForm
) -> Values:
    """What the model sees, without what it is to say.

    Args:
        read: (start, stop) → tokens at these positions.
        segments: The positions, by document.
        length: Of the sample; the rest is padding.
        form: What it consists of.
    """
    inputs = np.full(length, form.pad, np.int64)
    documents = np.zeros(length, np.int64)
    positions = np.zeros(length, np.int64)
    place = 0
    for number, part in enumerate(segments, 1):
        count = part.stop - part.start
        here = slice(place, place + count)
        inputs[here] = read(part.start, part.stop)
        documents[here] = number
        positions[here] = np.arange(count)
        place += count
    positions[place:] = np.arange(length - place)
    values: Values = {"inputs": inputs}
    if form.within_documents:
        values |= {"position_ids": positions, "document_ids": documents}
    if form.mask == "padding":
        values["attention_mask"] = (documents > 0).astype(np.int64)
    elif form.mask == "documents":
        values["attention_mask"] = (documents[:, None] == documents[None, :])[None]
    return values


def target_values(
    read: ReadTokens,
    segments: Sequence[DocumentSlice],
    length: int,
    *,
    shifted: bool = True,
    separated: bool = False,
    counted: ReadTokens | None = None,
) -> Tokens:
    """What is to be learnt.

    Args:
        read: (start, stop) → tokens at these positions.
        segments: The positions of the inputs, by document.
        length: Of the sample; the rest is `IGNORED`.
        shifted: Whether targets are the inputs one token later; else they are the inputs.
        separated: Whether nothing is predicted from another document.
        counted: (start, stop) → 1 for each token that is a target; None: all are.
    """
    targets = np.full(length, IGNORED, np.int64)
    ahead = int(shifted)
    place = 0
    for part in segments:
        count = part.stop - part.start
        here = targets[place : place + count]
        known = part.start + ahead, part.stop + ahead
        here[:] = read(*known)
        if counted is not None:
            here[counted(*known) == 0] = IGNORED
        if separated and shifted and part.crosses:
            here[-1] = IGNORED
        if separated and not shifted:
            here[0] = IGNORED  # it would be predicted from another document
        place += count
    return targets


class TextSamples(PackedSamples):
    """Next-token prediction: `inputs` and `targets`, (tokens,) int64 each.

    With documents separated also `position_ids` and `document_ids`, (tokens,) int64: positions begin with 0
    in each document; documents are counted from 1, and padding is 0. `attention_mask` is (tokens,) int64 or
    (1, tokens, tokens) bool. A target is `IGNORED` where there is padding, where the next token is another
    document's and documents are separated or packed, and where only answers count.
    """

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self._sample(index, self.sample_tokens)

    def gather(self, indices: Sequence[int]) -> Mapping[str, Any]:
        """Name → (len(indices), …)."""
        length = self.sample_tokens
        if self._form.pad_to_longest:
            length = max(sum(part.stop - part.start for part in self.segments(index)) for index in indices)
        samples = [self._sample(index, length) for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def _sample(self, index: int, length: int) -> Values:
        segments = self.segments(index)
        values = self.inputs(segments, length)
        targets = self._targets(segments, length)
        if self._file.counted is not None and not (targets != IGNORED).any():
            raise UnreadableSample(
                f"conversation {segments[0].document + 1:,} has no answer in its first {length:,} tokens; "
                "raise data.sample_tokens"
            )
        return {"inputs": values.pop("inputs"), "targets": targets, **values}

    def _targets(self, segments: Sequence[DocumentSlice], length: int) -> Tokens:
        counted = self._file.counted
        return target_values(
            self._file.tokens.read,
            segments,
            length,
            shifted=self._form.shifted,
            separated=self._form.within_documents or self.packing.padded,
            counted=None if counted is None else counted.read,
        )
