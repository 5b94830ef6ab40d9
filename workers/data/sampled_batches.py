"""Batches of samples: which ones by the order, in whose place another comes if one is unreadable."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from workers.data.batches import Batch, SourceAccount, Split
from workers.data.collating import Collate, as_tensor, stack
from workers.data.order import SampleOrder
from workers.data.permutation import Indices, key_number
from workers.data.samples import UnreadableSample
from workers.data.views import SampleView

CHUNK = 4096
"""Positions whose samples are found at once: numpy's cost of a call is shared by them."""

MOST_REPLACED = 64
"""Unreadable samples in a row in one place; then the source is what is unreadable."""


@dataclass(frozen=True)
class SampleSource:
    """One source of a split: its samples, and the part of the job file that says how they are named."""

    view: SampleView
    spec: SourceSpec


@dataclass(frozen=True)
class PlacedDraws:
    """`Draws`, and where each sample is within its source: (count,) int64 each."""

    sources: Indices
    epochs: Indices
    indices: Indices
    places: Indices


@dataclass(frozen=True)
class SplitSamples:
    """The samples of one split and their order; of an evaluation set, random transforms are left out."""

    sources: tuple[SampleSource, ...]
    order: SampleOrder
    transformed: bool


class SampledBatches:
    """A `BatchSource` of samples.

    Args:
        splits: By name, `train` among them.
        seed: The job's `training.seed`.
        samples: Samples of a microbatch.
        microbatches: Microbatches of a step.
        digest: Of the data.
        collate: Makes a batch of samples; None: they are stacked.
        replaces: Whether another sample comes in place of one that is unreadable.
    """

    def __init__(
        self,
        splits: Mapping[Split, SplitSamples],
        *,
        seed: int,
        samples: int,
        microbatches: int,
        digest: str,
        collate: Collate | None = None,
        replaces: bool = True,
    ) -> None:
        self._splits = dict(splits)
        self._seed = seed
        self._samples = samples
        self._microbatches = microbatches
        self._collate = collate
        self._replaces = replaces
        self._chunk = functools.lru_cache(maxsize=8)(self._draw_chunk)
        self.digest = digest
        self.replaced = 0
        self.tokens = sum(
            each.view.size * each.spec.tokens_per_sample
            for part in self._splits.values()
            for each in part.sources
        )
        views = [each.view for part in self._splits.values() for each in part.sources]
        self.vocabulary = max((view.vocabulary or 0 for view in views), default=0) or None

        trained = self._splits["train"].sources if "train" in self._splits else ()
        for number, source in enumerate(trained):
            source.view.follow(functools.partial(self._upcoming, number))

    def _upcoming(self, source: int, start: int, count: int) -> Indices:
        """The train samples of one source at these positions; -1: another's."""
        draws = self._splits["train"].order.draws(start, count)
        return np.where(draws.sources == source, draws.indices, -1)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.batch("train", 0, 0))

    def batch(self, split: Split, step: int, microbatch: int) -> Batch:
        part = self._part(split)
        position = self._position(step, microbatch)
        draws = self._draws(split, position)
        if split == "train":
            for each in part.sources:
                each.view.reached(position)
        sources = np.unique(draws.sources)
        if (
            self._collate is None
            and sources.size == 1
            and part.sources[source := int(sources[0])].view.gathers
        ):
            found = self._gathered(part.sources[source], draws)
            if found is not None:
                return found
        made = [self._sample(split, part, draws, step, microbatch, number) for number in range(self._samples)]
        return stack(made) if self._collate is None else self._collate(made)

    def samples(self, split: Split, step: int, microbatch: int) -> list[Mapping[str, Any]]:
        part = self._part(split)
        position = self._position(step, microbatch)
        if split == "train":
            for each in part.sources:
                each.view.reached(position)
        draws = self._draws(split, position)
        return [
            self._sample(split, part, draws, step, microbatch, number, travels=True)
            for number in range(self._samples)
        ]

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        part = self._part(split)
        if not any(source.view.expects for source in part.sources):
            return  # whoever calls has better things to do than to draw samples
        draws = self._draws(split, self._position(step, microbatch))
        for number, source in enumerate(part.sources):
            mine = draws.places[draws.sources == number]
            if mine.size:
                source.view.expect_at(mine)

    def size(self, split: Split) -> int | None:
        return sum(source.view.size for source in self._part(split).sources)

    def account(self, step: int) -> tuple[SourceAccount, ...]:
        train = self._splits["train"]
        seen = train.order.counts(step * self._microbatches * self._samples)
        return tuple(
            SourceAccount(source.view.name, samples, size)
            for source, samples, size in zip(train.sources, seen, train.order.epoch_sizes(), strict=True)
        )

    def close(self) -> None:
        for source in {
            id(each.view): each for part in self._splits.values() for each in part.sources
        }.values():
            source.view.close()
        self._chunk.cache_clear()

    def _part(self, split: Split) -> SplitSamples:
        if split not in self._splits:
            raise BadData(f"data: there is no {split} part; there are {', '.join(self._splits)}")
        return self._splits[split]

    def _position(self, step: int, microbatch: int) -> int:
        return (step * self._microbatches + microbatch) * self._samples

    def _draws(self, split: Split, start: int) -> PlacedDraws:
        first, offset = divmod(start, CHUNK)
        last = (start + self._samples - 1) // CHUNK
        chunks = [self._chunk(split, chunk) for chunk in range(first, last + 1)]
        here = slice(offset, offset + self._samples)
        found = (
            chunks[0] if len(chunks) == 1 else [np.concatenate(parts) for parts in zip(*chunks, strict=True)]
        )
        return PlacedDraws(*(values[here] for values in found))

    def _draw_chunk(self, split: Split, chunk: int) -> tuple[Indices, Indices, Indices, Indices]:
        part = self._splits[split]
        draws = part.order.draws(chunk * CHUNK, CHUNK)
        places = np.empty(CHUNK, dtype=np.int64)
        for number, source in enumerate(part.sources):
            mine = np.flatnonzero(draws.sources == number)
            if mine.size:
                places[mine] = source.view.places(draws.indices[mine])
        return draws.sources, draws.epochs, draws.indices, places

    def _gathered(self, source: SampleSource, draws: PlacedDraws) -> Batch | None:
        """The batch at once; None if a sample of it is unreadable, which is then looked for one by one."""
        try:
            values = source.view.gather_at(draws.places)
        except UnreadableSample:
            return None
        return {
            name: _typed(name, as_tensor(name, value), source.spec)
            for name, value in _renamed(values, source.spec).items()
        }

    def _sample(
        self,
        split: Split,
        part: SplitSamples,
        draws: PlacedDraws,
        step: int,
        microbatch: int,
        number: int,
        *,
        travels: bool = False,
    ) -> Any:
        """One sample; `travels`: as functions of `data.preprocess` take it, with what is no tensor yet."""
        source = part.sources[int(draws.sources[number])]
        epoch, index = int(draws.epochs[number]), int(draws.indices[number])
        seed = None
        if part.transformed:
            seed = key_number(self._seed, step, microbatch, number, "transforms")
        for attempt in range(MOST_REPLACED):
            place = int(draws.places[number])
            if attempt:
                drawn = key_number(self._seed, split, source.view.name, epoch, index, "instead", attempt)
                other = np.array([drawn % source.view.size], dtype=np.int64)
                place = int(source.view.places(other)[0])
            try:
                if self._collate is not None and not travels:
                    return source.view.raw_at(place, seed)
                values = _renamed(source.view.sample_at(place, seed), source.spec)
            except UnreadableSample as error:
                if not self._replaces:
                    raise BadData(
                        f"{error.text}; data.on_unreadable: replace takes another instead"
                    ) from error
                self.replaced += 1
                last = error
                continue
            if not source.spec.dtypes:
                return values
            wanted = source.spec.dtypes if travels else values
            typed = {
                name: _typed(name, as_tensor(name, value), source.spec)
                for name, value in values.items()
                if name in wanted
            }
            return {**values, **typed}
        raise BadData(f"{source.view.name}: {MOST_REPLACED} samples in a row are unreadable: {last.text}")


def _renamed(values: Mapping[str, Any], spec: SourceSpec) -> Mapping[str, Any]:
    if not isinstance(spec.names, dict) or not spec.names:
        return values
    if missing := [name for name in spec.names if name not in values]:
        raise BadData(f"data.names: samples have no {missing[0]!r}; they have {', '.join(map(str, values))}")
    return {spec.names.get(name, name): value for name, value in values.items()}


def _typed(name: str, tensor: torch.Tensor, spec: SourceSpec) -> torch.Tensor:
    kind = spec.dtypes.get(name)
    return tensor if kind is None else tensor.to(getattr(torch, kind))
