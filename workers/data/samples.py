"""What a source of samples is: a length, and random access to samples that never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from schemas.errors import BadData
from workers.data.permutation import Indices


class Samples(Protocol):
    """Samples by index: pure, so that any data instance gets the same sample, any number of times.

    Called on one thread at a time. An I/O error is raised as what it is (OSError): the instance fails and is
    replaced. Only a sample whose bytes are there and make no sample is an `UnreadableSample`.

    Attributes:
        digest: SHA-256 of what identifies the data: names, sizes, contents or etags where that is cheap;
            never times or absolute paths, which differ between nodes.
    """

    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Name → number, numpy array or Tensor, without the dimension of samples; always the same names.

        Raises:
            UnreadableSample: Its bytes make it unreadable.
        """
        ...

    def close(self) -> None:
        """Releases files. Idempotent."""
        ...


@runtime_checkable
class ExpectingSamples(Protocol):
    """Samples that may read ahead."""

    @property
    def reads_ahead(self) -> bool:
        """Whether it helps to say what is expected; always the same."""
        ...

    def expect(self, indices: Sequence[int]) -> None:
        """These samples are needed soon, in this order. Returns at once; any thread may call it."""
        ...


@runtime_checkable
class ForeseeingSamples(Protocol):
    """Samples that keep on disk what is needed soonest (ADR-0048)."""

    def follow(self, upcoming: Callable[[int, int], Indices]) -> None:
        """From now on they are needed in this order.

        Args:
            upcoming: (first position, count) → the samples at these positions, (count,) int64; -1: of another
                source. Pure; any thread may call it.
        """
        ...

    def reached(self, position: int) -> None:
        """The samples at this position are being made. Returns at once; any thread may call it."""
        ...


@runtime_checkable
class BlockSamples(Protocol):
    """Samples that lie in blocks (shards), each of which is read whole.

    Attributes:
        blocks: Samples of each block, in order of index. Their sum is the length.
    """

    blocks: tuple[int, ...]


@runtime_checkable
class SeededSamples(Protocol):
    """Samples with random transforms, a pure function of the index and a seed."""

    def draw(self, index: int, seed: int | None) -> Mapping[str, Any]:
        """The sample as transformed under `seed`, 64 bits; None: without the random transforms."""
        ...


@runtime_checkable
class RawSamples(Protocol):
    """Samples that the user's own code makes: `data.collate` gets them as they are."""

    def raw(self, index: int, seed: int | None) -> Any:
        """What the user's code gives; see `SeededSamples.draw`."""
        ...


@runtime_checkable
class GatheredSamples(Protocol):
    """Samples of which many are read at once faster than one by one."""

    def gather(self, indices: Sequence[int]) -> Mapping[str, Any]:
        """Name → array or Tensor (len(indices), …): what stacking the samples would give."""
        ...


@dataclass(frozen=True)
class Opening:
    """What a kind is told about the place where it is opened.

    Attributes:
        at: The source's key in the job file, for error texts: `data`, `data.mixture[0]`.
        seed: The job's `training.seed`.
        spool: A folder of this source alone, for what it has to write down; removed when the data is closed.
        fetched: `bus://` URL → the file that holds what was uploaded under it.
        feeds: Key in the job file → the feed that was opened for it.
    """

    at: str
    seed: int
    spool: Path
    fetched: Mapping[str, Path] = field(default_factory=dict)
    feeds: Mapping[str, object] = field(default_factory=dict)


class UnreadableSample(BadData):
    """This one sample's bytes make it unreadable: always, on every node. An I/O error never is this."""
