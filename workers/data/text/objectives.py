"""What else can be learnt from text than the next token: tokens that were masked, spans that were taken out.

Both draw at random, from a given seed, by the raw numbers of Philox: the same on every version of numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workers.data.samples import UnreadableSample
from workers.data.text.packing import SamplePacking
from workers.data.text.text_samples import IGNORED, PackedSamples, SampleForm, Tokens, Values
from workers.data.text.token_file import TokenFile

_WHOLE = 1 << 64


class _Draws:
    """Random numbers of one sample."""

    def __init__(self, index: int, seed: int | None) -> None:
        text = f"evaluation {index}" if seed is None else f"sample {index} {seed}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
        self._source = np.random.Philox(key=key)

    def raw(self, count: int) -> npt.NDArray[np.uint64]:
        return self._source.random_raw(count)

    def permuted(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values[np.argsort(self.raw(len(values)), kind="stable")]


def _below(fraction: float) -> np.uint64:
    return np.uint64(min(int(fraction * _WHOLE), _WHOLE - 1))


class MaskedSamples(PackedSamples):
    """Masked language models (Devlin et al. 2018): of the tokens that are chosen, 80 % become the mask, 10 %
    any other token, 10 % stay; they are the targets, all others are `IGNORED`. Special tokens are never
    chosen and never drawn. At least one token is chosen.

    Args:
        file: The tokens.
        packing: Which make a sample.
        form: What else a sample has.
        fraction: Probability that a token is chosen.
        mask: Id of the mask token.
        special: Ids of special tokens.
    """

    def __init__(
        self,
        file: TokenFile,
        packing: SamplePacking,
        form: SampleForm,
        *,
        fraction: float,
        mask: int,
        special: frozenset[int],
    ) -> None:
        super().__init__(file, packing, form, "masked", fraction, mask, sorted(special))
        self._fraction = fraction
        self._mask = mask
        self._is_special = np.zeros(form.vocabulary, bool)
        self._is_special[[each for each in special | {mask} if each < form.vocabulary]] = True
        self._ordinary = np.flatnonzero(~self._is_special)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self.draw(index, None)

    def draw(self, index: int, seed: int | None) -> Mapping[str, Any]:
        """`inputs` and `targets`, (tokens,) int64, masked under `seed`; None: always the same, by index."""
        segments = self.segments(index)
        values = self.inputs(segments, self.sample_tokens)
        count = sum(part.stop - part.start for part in segments)
        ids = values["inputs"][:count]
        may = np.flatnonzero(~self._is_special[ids])
        if not len(may):
            raise UnreadableSample(f"document {segments[0].document + 1:,} has none but special tokens")
        draws = _Draws(index, seed)
        chance = draws.raw(len(may))
        chosen = may[(chance < _below(self._fraction)) | (chance == chance.min())]
        targets = np.full(self.sample_tokens, IGNORED, np.int64)
        targets[chosen] = ids[chosen]
        what, which = draws.raw(len(chosen)), draws.raw(len(chosen))
        others = self._ordinary[(which % np.uint64(len(self._ordinary))).astype(np.int64)]
        ids[chosen] = np.where(
            what < _below(0.8), self._mask, np.where(what < _below(0.9), others, ids[chosen])
        )
        return {"inputs": values.pop("inputs"), "targets": targets, **values}


class SpanLengths(NamedTuple):
    """Lengths of a sample of spans: tokens before, then those of encoder and decoder, and the spans."""

    tokens: int
    inputs: int
    targets: int
    noise: int
    spans: int


def span_lengths(sample_tokens: int, fraction: float, span_tokens: float) -> SpanLengths:
    """The most tokens of which no more than `sample_tokens` are left without the spans (as T5 counts)."""

    def of(tokens: int) -> SpanLengths:
        noise = min(max(round(tokens * fraction), 1), tokens - 1)
        spans = min(max(round(noise / span_tokens), 1), noise, tokens - noise)
        return SpanLengths(tokens, tokens - noise + spans + 1, noise + spans + 1, noise, spans)

    tokens = 2
    while of(tokens + 1).inputs <= sample_tokens:
        tokens += 1
    return of(tokens)


class SpanSamples(PackedSamples):
    """T5's spans (Raffel et al. 2019): spans of tokens are taken out, each behind a sentinel of its own.

    `inputs` has the sentinels in the spans' places, `targets` each sentinel and its span; both end with eos.
    `decoder_inputs` are the targets one token later, beginning with padding. All are int64, `inputs` of
    `sample_tokens`, the others of `SpanLengths.targets`.

    Args:
        file: The tokens.
        packing: Windows of `SpanLengths.tokens` tokens.
        form: What else a sample has.
        lengths: Of a sample.
        sample_tokens: Tokens of the encoder.
        eos: Id behind inputs and targets.
        sentinels: Ids of sentinels, at least as many as there are spans.
    """

    def __init__(
        self,
        file: TokenFile,
        packing: SamplePacking,
        form: SampleForm,
        *,
        lengths: SpanLengths,
        sample_tokens: int,
        eos: int,
        sentinels: list[int],
    ) -> None:
        super().__init__(file, packing, form, "spans", lengths, sample_tokens, eos, sentinels)
        self._lengths = lengths
        self._encoder_tokens = sample_tokens
        self._eos = eos
        self._sentinels = np.array(sentinels[: lengths.spans], np.int64)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self.draw(index, None)

    def draw(self, index: int, seed: int | None) -> Mapping[str, Any]:
        """The sample with spans drawn under `seed`; None: always the same, by the index."""
        ids: Tokens = self.inputs(self.segments(index), self.sample_tokens)["inputs"]
        taken = _taken(_Draws(index, seed), self._lengths)
        inputs = np.full(self._encoder_tokens, self._form.pad, np.int64)
        inputs[: self._lengths.inputs] = self._marked(ids, taken)
        targets = self._marked(ids, ~taken)
        values: Values = {
            "inputs": inputs,
            "decoder_inputs": np.concatenate([[self._form.pad], targets[:-1]]),
            "targets": targets,
        }
        if self._form.mask == "padding":
            values["attention_mask"] = (np.arange(len(inputs)) < self._lengths.inputs).astype(np.int64)
        return values

    def _marked(self, ids: Tokens, gone: npt.NDArray[np.bool_]) -> Tokens:
        """The ids with a sentinel in place of each run of those that are gone, and eos."""
        starts = gone & ~np.concatenate([[False], gone[:-1]])
        marked = np.where(starts, self._sentinels[np.maximum(np.cumsum(starts) - 1, 0)], ids)
        return np.concatenate([marked[~gone | starts], [self._eos]])


def _taken(draws: _Draws, lengths: SpanLengths) -> npt.NDArray[np.bool_]:
    """Which tokens are taken out, (tokens,) bool: spans of random length, the first token never."""
    kept = _parts(draws, lengths.tokens - lengths.noise, lengths.spans)
    noise = _parts(draws, lengths.noise, lengths.spans)
    runs = np.stack([kept, noise], axis=1).ravel()
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def _parts(draws: _Draws, items: int, parts: int) -> npt.NDArray[np.int64]:
    """Lengths of `parts` runs, at least 1 each, that sum up to `items`."""
    begins = draws.permuted(np.arange(items - 1) < parts - 1)
    return np.bincount(np.cumsum(np.concatenate([[0], begins])), minlength=parts)
