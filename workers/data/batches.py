"""What a source of batches is: the whole data of a job, as the instances that make batches see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

Batch = dict[str, Tensor]
"""Name → (samples, …) of everything that model and loss may take, in an order that is always the same."""

Made = TypeVar("Made")

Split = str
"""`train`, or the name of an evaluation set; if the job names none, it is `validation`."""


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """What a job has seen of one source.

    Attributes:
        name: The source's place in the job file: `data`, `data.mixture[0]`.
        samples: Samples taken from it.
        epoch_samples: Samples of one of its epochs; None: windows from anywhere, which have no epochs, or a
            feed, whose end is not known.
        feed: The `uid` of the feed that it is; empty: it is none in the order of arrival.
    """

    name: str
    samples: int
    epoch_samples: int | None
    feed: str = ""

    @property
    def epochs(self) -> float | None:
        """Times that each of its samples was seen."""
        return None if self.epoch_samples is None else self.samples / self.epoch_samples


class BatchSource(Protocol):
    """Batches as a pure function of (split, step, microbatch), whoever makes them and however often."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of a batch's tensors, in their order."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of all that the batches are made of, but the seed and the numbers of samples."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of all splits together; samples, if they are no tokens."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """The largest id that a sample may hold, plus one; None: that is not known, or there are no ids."""
        ...

    def batch(self, split: Split, step: int, microbatch: int) -> Batch:
        """One microbatch. Blocks; call it on one thread at a time.

        Raises:
            BadData: The split is not there, or a sample is unreadable and may not be replaced.
            OSError: Files can't be read now.
        """
        ...

    def samples(self, split: Split, step: int, microbatch: int) -> Sequence[Mapping[str, Any]]:
        """The microbatch's samples one by one, as they are before `data.preprocess` and before they are put
        together. Blocks, and raises, like `batch`.
        """
        ...

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        """This microbatch is needed soon: whatever reads ahead may begin.

        Returns at once; any thread may call it.
        """
        ...

    def size(self, split: Split) -> int | None:
        """Samples of an epoch of the split, of all its sources; None: windows from anywhere."""
        ...

    def account(self, step: int) -> tuple[SourceAccount, ...]:
        """What was seen for training before `step`, by source. Pure."""
        ...

    @property
    def replaced(self) -> int:
        """Unreadable samples in whose place this process has put another."""
        ...

    def close(self) -> None:
        """Releases files. Idempotent."""
        ...


def counted(source: BatchSource, make: Callable[[], Made]) -> tuple[Made, int]:
    """What `make` takes from a source, and how many samples were put in an unreadable one's place for it.

    Call it on the one thread that takes from the source: the number is a function of what is made.
    """
    before = source.replaced
    made = make()
    return made, source.replaced - before
