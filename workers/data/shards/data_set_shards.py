"""Kind `dataset`: windows by arithmetic, documents and packed segments by the index of their shard."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bus.logs import get_logger
from schemas.errors import BadData, DmscError
from schemas.job_file.data import SourceSpec
from workers.data.data_set.split_files import SplitFiles
from workers.data.samples import Opening
from workers.data.shards.shard_samples import ShardFormat, ShardSamples
from workers.data.storage.range_reader import RangeReader, Storage
from workers.data.text.packing import DocumentSlice
from workers.data.text.text_samples import SampleForm, input_values, target_values

log = get_logger("data")

MOST_MASKED_TOKENS = 1 << 14
"""Longer samples have no mask of (tokens, tokens): 256 MiB each."""


class _Span(NamedTuple):
    """Tokens [start, stop) of a shard, the one behind the last input included."""

    start: int
    stop: int


class TokenShards(ShardFormat):
    """Windows or documents.

    A sample has what `TextSamples` of kind text gives: `inputs` and `targets`, (sample_tokens,) int64 each,
    with documents separated also `position_ids` and `document_ids`; `attention_mask` as the job says.

    Args:
        files: The split.
        spec: The job's source.
    """

    def __init__(self, files: SplitFiles, spec: SourceSpec) -> None:
        manifest = files.manifest
        assert manifest.dtype is not None
        self._files = files
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._length = spec.sample_tokens
        self._is_windows = manifest.packing == "concatenate"
        self._is_documents = manifest.content == "documents"
        self.counts = np.array([shard.rows for shard in files.shards], np.int64)
        self.file_bytes = np.array([shard.bytes for shard in files.shards], np.int64)
        padded = not self._is_windows
        mask = spec.attention_mask
        if mask == "auto":
            mask = "padding" if padded and spec.attention == "across_documents" else "none"
        self._form = SampleForm(
            pad=manifest.pad_id or 0,
            within_documents=spec.attention == "within_documents",
            mask=mask,
            vocabulary=manifest.vocabulary or 1 << 32,
        )
        self._separated = padded or self._form.within_documents

    def identity(self) -> bytes:
        digests = [shard.sha256 + shard.index.sha256 for shard in self._files.shards]
        return "\n".join([repr(self._form), str(self._length), *digests]).encode()

    def name(self, shard: int) -> str:
        return self._files.name(shard)

    def reader(self, shard: int) -> RangeReader:
        return self._files.reader(shard)

    def raw(self, shard: int, sample: int) -> bytes:
        span = self._span(shard, sample)
        size = self._dtype.itemsize
        return self._files.read(shard, span.start * size, (span.stop - span.start) * size)

    def _span(self, shard: int, sample: int) -> _Span:
        if self._is_windows:
            start = sample * self._length
            return _Span(start, start + self._length + 1)
        index = self._files.index(shard)
        if self._is_documents:
            start, stop = index.borders[sample : sample + 2].tolist()
            return _Span(start, min(stop, start + self._length + 1))
        first, last = index.firsts[sample : sample + 2].tolist()
        return _Span(int(index.borders[first]), int(index.borders[last]))

    def _segments(self, shard: int, sample: int, span: _Span) -> list[DocumentSlice]:
        """The inputs by document, as places within the span."""
        end = span.stop - span.start
        if self._is_documents:
            return [DocumentSlice(0, 0, end - 1, False)]
        index = self._files.index(shard)
        if self._is_windows:
            borders = index.borders
            first = int(np.searchsorted(borders, span.start, side="right"))
            last = int(np.searchsorted(borders, span.stop - 1, side="left"))
            inner = (borders[first : last + 1] - span.start).tolist()
            starts = [0, *(border for border in inner if border < end - 1)]
            stops = [*starts[1:], end - 1]
            crosses = {border for border in inner if border <= end - 1}
            return [
                DocumentSlice(number, start, stop, stop in crosses)
                for number, (start, stop) in enumerate(zip(starts, stops, strict=True))
            ]
        first, last = index.firsts[sample : sample + 2].tolist()
        borders = (index.borders[first : last + 1] - span.start).tolist()
        return [
            DocumentSlice(number, start, stop - 1, False)
            for number, (start, stop) in enumerate(itertools.pairwise(borders))
        ]

    def decode(self, shard: int, sample: int, data: bytes, columns: Mapping[str, str]) -> dict[str, Any]:
        tokens: npt.NDArray[np.int64] = np.frombuffer(data, self._dtype).astype(np.int64)
        if len(tokens) and int(tokens.max()) >= self._form.vocabulary:
            raise BadData(f"{self.name(shard)}: a token lies beyond the vocabulary; build it again")
        if not self._separated and self._form.mask != "documents":
            values: dict[str, Any] = {"inputs": tokens[:-1], "targets": tokens[1:]}
            if self._form.mask == "padding":
                values["attention_mask"] = np.ones(self._length, np.int64)
            return values
        segments = self._segments(shard, sample, self._span(shard, sample))

        def read(start: int, stop: int) -> npt.NDArray[np.int64]:
            return tokens[start:stop]

        inputs = input_values(read, segments, self._length, self._form)
        targets = target_values(read, segments, self._length, separated=self._separated)
        return {"inputs": inputs.pop("inputs"), "targets": targets, **inputs}


class DataSetSamples(ShardSamples):
    """Samples of a data set.

    Args:
        shards: The split.
        storage: Where its files are.
        vocabulary: The largest id that they may hold, plus one.
    """

    def __init__(self, shards: TokenShards, storage: Storage, vocabulary: int | None) -> None:
        super().__init__(shards, storage)
        self.vocabulary = vocabulary

    def gather(self, indices: Sequence[int]) -> Mapping[str, Any]:
        """Name → (len(indices), …)."""
        samples = [self[index] for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def open_data_set(spec: SourceSpec, opening: Opening) -> DataSetSamples:
    """The samples of a split of windows or documents.

    Raises:
        BadData: It holds records, or windows of another length; or its files are not those that were built.
        Unavailable: The store does not answer.
    """
    if spec.data_set is None:
        raise BadData(f"{opening.at}.source {spec.source}: kind dataset reads dataset://NAME or NAME@VERSION")
    files = SplitFiles(spec.data_set, opening.fetched, opening.at)
    try:
        manifest = files.manifest
        what = f"{opening.at}.source dataset://{manifest.name}@{manifest.version}"
        if manifest.content == "records":
            raise BadData(f"{what} holds records, not tokens; say {opening.at}.kind: text, chat or table")
        if manifest.sample_tokens not in (None, spec.sample_tokens):
            raise BadData(
                f"{what} has windows of {manifest.sample_tokens:,} tokens, and {opening.at}.sample_tokens is "
                f"{spec.sample_tokens:,}; say {manifest.sample_tokens}, or leave it out"
            )
        if spec.attention_mask == "documents" and spec.sample_tokens > MOST_MASKED_TOKENS:
            raise BadData(
                f"{opening.at}.attention_mask: documents takes sample_tokens² bytes a sample, here "
                f"{spec.sample_tokens**2:,}; it goes up to {MOST_MASKED_TOKENS:,} tokens"
            )
        samples = DataSetSamples(TokenShards(files, spec), files.storage, manifest.vocabulary)
    except DmscError:
        files.close()
        raise
    log.info("data set opened", data_set=f"{manifest.name}@{manifest.version}", samples=len(samples))
    return samples
