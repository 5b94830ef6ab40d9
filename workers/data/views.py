"""Parts of a source's samples: what is trained on, and what is held out, by a keyed draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workers.data.permutation import Indices, Permutation
from workers.data.samples import (
    BlockSamples,
    ExpectingSamples,
    ForeseeingSamples,
    GatheredSamples,
    RawSamples,
    Samples,
    SeededSamples,
)

Places = Callable[[Indices], Indices]
"""Indices within a view, (count,) int64 → indices within the source."""


class SampleView:
    """Some of a source's samples, under indices of their own.

    Args:
        samples: The source.
        size: Samples of the view.
        places: Where each one is in the source; None: under the same index.
        blocks: The blocks of the view; empty: none.
        name: The source's key in the job file.
    """

    def __init__(
        self,
        samples: Samples,
        size: int,
        places: Places | None = None,
        blocks: Sequence[int] = (),
        *,
        name: str = "data",
    ) -> None:
        self._samples = samples
        self._places = places
        self._expects = samples if isinstance(samples, ExpectingSamples) and samples.reads_ahead else None
        self._draws = samples if isinstance(samples, SeededSamples) else None
        self._foresees = samples if isinstance(samples, ForeseeingSamples) else None
        self._gathers = samples if isinstance(samples, GatheredSamples) else None
        self._raw = samples if isinstance(samples, RawSamples) else None
        self.size = size
        self.blocks = tuple(blocks)
        self.name = name
        self.vocabulary: int | None = getattr(samples, "vocabulary", None)

    @property
    def gathers(self) -> bool:
        """Whether `gather_at` may be called."""
        return self._gathers is not None

    def places(self, indices: Indices) -> Indices:
        """Where samples of this view are within the source. One call for many: calls are what costs."""
        return indices if self._places is None else self._places(indices)

    def sample_at(self, place: int, seed: int | None) -> Mapping[str, Any]:
        """The sample at a place within the source; see `Samples` and `SeededSamples`."""
        return self._samples[place] if self._draws is None else self._draws.draw(place, seed)

    def raw_at(self, place: int, seed: int | None) -> Any:
        """The same as the user's code gives it, or else as it is."""
        return self.sample_at(place, seed) if self._raw is None else self._raw.raw(place, seed)

    def gather_at(self, places: Indices) -> Mapping[str, Any]:
        assert self._gathers is not None
        return self._gathers.gather(places.tolist())

    @property
    def expects(self) -> bool:
        """Whether `expect_at` does anything."""
        return self._expects is not None

    def expect_at(self, places: Indices) -> None:
        if self._expects is not None:
            self._expects.expect(places.tolist())

    def follow(self, upcoming: Callable[[int, int], Indices]) -> None:
        """See `ForeseeingSamples`; `upcoming` gives indices within this view."""
        if self._foresees is None:
            return

        def within_source(start: int, count: int) -> Indices:
            indices = upcoming(start, count)
            mine = np.flatnonzero(indices >= 0)
            indices[mine] = self.places(indices[mine])
            return indices

        self._foresees.follow(within_source)

    def reached(self, position: int) -> None:
        if self._foresees is not None:
            self._foresees.reached(position)

    def close(self) -> None:
        self._samples.close()


def whole(samples: Samples, *, name: str = "data") -> SampleView:
    """All of a source's samples."""
    return SampleView(samples, len(samples), None, _blocks(samples), name=name)


def split(
    samples: Samples, fraction: float, *key: object, shuffled: bool, name: str = "data"
) -> tuple[SampleView, SampleView]:
    """What is trained on, and what is held out: the fraction, rounded down, or at least one whole block.

    Args:
        samples: The source.
        fraction: Of its samples, which is held out.
        key: What the draw is made from.
        shuffled: Whether the samples are drawn; else the last ones are held out.
        name: The source's key in the job file.
    """
    size, blocks = len(samples), _blocks(samples)
    held = int(size * fraction)
    if not held:
        return whole(samples, name=name), SampleView(samples, 0, name=name)
    if not shuffled:
        rest = size - held
        return SampleView(samples, rest, name=name), SampleView(samples, held, lambda i: i + rest, name=name)
    if len(blocks) > 1:
        return _split_blocks(samples, blocks, held, key, name)
    drawn = Permutation(size, *key, "held out")
    rest = size - held
    return (
        SampleView(samples, rest, drawn, name=name),
        SampleView(samples, held, lambda indices: drawn(indices + rest), name=name),
    )


def _blocks(samples: Samples) -> tuple[int, ...]:
    return tuple(samples.blocks) if isinstance(samples, BlockSamples) else ()


def _split_blocks(
    samples: Samples, blocks: tuple[int, ...], held: int, key: tuple[object, ...], name: str
) -> tuple[SampleView, SampleView]:
    order = Permutation(len(blocks), *key, "held out")(np.arange(len(blocks), dtype=np.int64)).tolist()
    chosen: set[int] = set()
    total = 0
    for block in order[:-1]:
        if total >= held:
            break
        chosen.add(block)
        total += blocks[block]
    parts = [[block for block in range(len(blocks)) if (block in chosen) is mine] for mine in (False, True)]
    kept, out = (_of_blocks(samples, blocks, part, name) for part in parts)
    return kept, out


def _of_blocks(samples: Samples, blocks: tuple[int, ...], part: list[int], name: str) -> SampleView:
    sizes = np.array(blocks, dtype=np.int64)
    starts = (np.cumsum(sizes) - sizes)[part]
    ends = np.cumsum(sizes[part])
    firsts = ends - sizes[part]

    def places(indices: Indices) -> Indices:
        block = np.searchsorted(ends, indices, side="right")
        found: Indices = starts[block] + indices - firsts[block]
        return found

    return SampleView(samples, int(ends[-1]), places, sizes[part].tolist(), name=name)
