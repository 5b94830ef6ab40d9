"""What a job has seen of its data before a step: samples and epochs by source, and samples put in another's
place.

Pure. Which source a sample is of is a function of (seed, position) (ADR-0046), so counting needs no report of
any instance: these are the numbers of `workers.data.interleaving`, without its arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

from pydantic import Field

from schemas.base import Part
from schemas.job import JobRecord, JobSpec
from schemas.task_graph import DataSource

BLOCK = 64
"""Draws of a mixture whose order is drawn together."""
_MASK = (1 << 64) - 1


class SeenSource(Part):
    """What was seen of one source. `epochs`: how often each of its samples was; None: windows have none."""

    name: str = Field(description="its place in the job file: `data`, `data.mixture[0]`")
    samples: int = Field(ge=0)
    epochs: float | None = Field(ge=0)


class DataAccount(Part):
    """What was seen before step `step`.

    `replaced` are unreadable samples in whose place another one was taken, each once for each time that it
    would have been seen.
    """

    step: int = Field(ge=0)
    sources: tuple[SeenSource, ...]
    replaced: int = Field(0, ge=0)

    def line(self) -> str:
        """The account in words."""
        seen = [
            f"{source.name} {source.samples:,} samples"
            + ("" if source.epochs is None else f" ({source.epochs:.2f} epochs)")
            for source in self.sources
        ]
        return "; ".join([*seen, f"{self.replaced:,} unreadable replaced"])


def account(spec: JobSpec, sources: Sequence[DataSource], step: int, replaced: int) -> DataAccount:
    """The account of a job before `step`; of one that an older version has analysed, without sources."""
    training = spec.training
    samples = step * training.microbatches * training.microbatch_samples
    counts = [samples]
    if len(sources) > 1:
        weights = exact_weights([part.weight for part in spec.data.mixture])
        counts = _counts(samples, weights, f"{training.seed}/train/turns")
    seen = tuple(
        SeenSource(name=source.name, samples=count, epochs=source.epochs(count))
        for source, count in zip(sources, counts, strict=False)
    )
    return DataAccount(step=step, sources=seen, replaced=replaced)


def account_of(record: JobRecord) -> DataAccount | None:
    """The account of a job as it is now; None before it is placed."""
    if record.graph is None:
        return None
    return account(record.spec, record.graph.sources, record.step, record.replaced)


def exact_weights(weights: Sequence[float]) -> list[Fraction]:
    """The weights as written (0.1 is a tenth), divided by their sum."""
    written = [Fraction(str(weight)) for weight in weights]
    total = sum(written, Fraction())
    return [weight / total for weight in written]


def _counts(draws: int, weights: Sequence[Fraction], key: str) -> list[int]:
    """How many of the first `draws` draws each source has; see `workers.data.interleaving.Interleaving`."""
    middle = len(weights) // 2
    if not middle:
        return [draws]
    share = sum(weights[:middle], Fraction()) / sum(weights, Fraction())
    block, inside = divmod(draws, BLOCK)
    before, until = ((each * BLOCK * share.numerator) // share.denominator for each in (block, block + 1))
    left = before + _left_in_block(block, inside, until - before, _key(key))
    return [
        *_counts(left, weights[:middle], f"{key}/0"),
        *_counts(draws - left, weights[middle:], f"{key}/1"),
    ]


def _left_in_block(block: int, inside: int, quota: int, key: int) -> int:
    """How many of a block's first `inside` draws go left, of which it has `quota`."""
    if not inside:
        return 0
    first = block * BLOCK
    rank = sorted(range(BLOCK), key=lambda draw: _mixed((_mixed(first + draw) + key) & _MASK))
    return sum(draw < inside for draw in rank[:quota])


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(value: int) -> int:
    """SplitMix64's finaliser."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
