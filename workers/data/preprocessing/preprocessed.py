"""The whole chain in one process, as analysis and check run it: the same bits as of instances together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.job import JobSpec
from schemas.registry import TensorSchema
from workers.data.batches import Batch, BatchSource, SourceAccount, Split
from workers.data.preprocessing.chain import BatchMaking, ChainLink, sample_schema
from workers.data.preprocessing.records import Sample, packed, unpacked


class PreprocessedBatches:
    """A `BatchSource` whose samples go through `data.preprocess`.

    Args:
        spec: The job.
        source: What the samples come from. It is closed with this.
        fetched: `bus://` URL → file.

    Raises:
        See `open_function`.
    """

    def __init__(self, spec: JobSpec, source: BatchSource, fetched: Mapping[str, Path] = {}) -> None:
        self._source = source
        self._links = [ChainLink(spec, number, fetched) for number in range(len(spec.data.preprocess))]
        self._making = BatchMaking(spec)
        self._names: tuple[str, ...] = ()
        self.digest, self.tokens = source.digest, source.tokens
        self.vocabulary: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        self._names = self._names or tuple(self.batch("train", 0, 0))
        return self._names

    def samples(self, split: Split, step: int, microbatch: int) -> Sequence[Sample]:
        return self._source.samples(split, step, microbatch)

    def batch(self, split: Split, step: int, microbatch: int) -> Batch:
        samples: Sequence[Sample] = self.samples(split, step, microbatch)
        for link in self._links:  # packed as on the way: what does not travel is refused here
            samples = link.apply(unpacked(packed(samples)), split, step, microbatch)
        return self._making.batch(samples)

    def records(self) -> tuple[tuple[TensorSchema, ...], ...]:
        """What each function takes: names, shapes and types of the first sample's values."""
        found, samples = [], self.samples("train", 0, 0)
        for link in self._links:
            found.append(sample_schema(samples[0]))
            samples = link.apply(unpacked(packed(samples)), "train", 0, 0)
        return tuple(found)

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        self._source.expect(split, step, microbatch)

    def size(self, split: Split) -> int | None:
        return self._source.size(split)

    def account(self, step: int) -> tuple[SourceAccount, ...]:
        return self._source.account(step)

    @property
    def replaced(self) -> int:
        return self._source.replaced

    def close(self) -> None:
        self._source.close()
