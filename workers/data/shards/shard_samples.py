"""Index → sample, for shards of any format: through ranges, with read-ahead and foresight."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import BadData, DmscError
from workers.data.kinds.decoding import seed_generators
from workers.data.samples import UnreadableSample
from workers.data.storage.foresight import Foresight, Upcoming
from workers.data.storage.range_reader import BlockUse, RangeReader, Storage
from workers.data.storage.read_ahead import ReadAhead, ReadAheadConfig
from workers.data.storage.sources import edge_bytes
from workers.user_code import describe, load

AT_ONCE = 1 << 16
"""A horizon up to this is looked through when it is due; a longer one by a thread of its own."""
FILES_AT_ONCE = 8
"""Files that are looked at together when a source is opened: as many as hide the store's delay."""
RATE_OVER = 4096
"""Positions over which the rate is measured that turns positions into seconds."""


class ShardFormat(ABC):
    """The shards of one source: how many samples each has, where they lie, and what their bytes mean.

    Any thread may call it, but for `decode`.

    Attributes:
        counts: (shards,) int64 samples of each shard.
        file_bytes: (shards,) int64 bytes of each shard's file, as far as they are known; for foresight.
    """

    counts: NDArray[np.int64]
    file_bytes: NDArray[np.int64]

    @abstractmethod
    def identity(self) -> bytes:
        """What tells these data from others, the same on every node."""

    @abstractmethod
    def name(self, shard: int) -> str:
        """The shard's file, for people."""

    @abstractmethod
    def reader(self, shard: int) -> RangeReader:
        """The shard's file, opened once; its `tag` is the shard."""

    @abstractmethod
    def raw(self, shard: int, sample: int) -> bytes:
        """The bytes of a sample. Raises `UnreadableSample`, or what the storage raises."""

    @abstractmethod
    def decode(self, shard: int, sample: int, data: bytes, columns: Mapping[str, str]) -> dict[str, Any]:
        """The sample that these bytes are: `columns`, or all. Raises anything if they are none."""

    @property
    def row_bytes(self) -> int | None:
        """The bytes of each sample, if all columns have a fixed size, the same in all shards."""
        return None

    def rows(self, rows: Sequence[bytes], columns: Mapping[str, str]) -> dict[str, NDArray[Any]]:
        """All samples of a batch at once, each of `row_bytes` bytes: name → (samples, …)."""
        raise NotImplementedError

    def read_rows(
        self, places: Sequence[tuple[int, int]], columns: Mapping[str, str]
    ) -> dict[str, NDArray[Any]] | None:
        """`rows` of (shard, sample), read to where they are wanted; None: they are not files of this machine
        as they are, and have to be read one by one."""
        return None

    def key(self, shard: int, sample: int) -> str:
        """What the sample is called in its shard, for people."""
        return f"sample {sample}"


def content_marks(readers: Sequence[RangeReader]) -> list[str]:
    """`RangeReader.content_mark` of each."""
    edge = edge_bytes(len(readers))
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="marks") as threads:
        return list(threads.map(lambda reader: reader.content_mark(edge), readers))


class ShardSamples:
    """Samples of shards, as `workers.data.samples` wants them.

    Args:
        shards: Their format.
        storage: Where their files are.
        columns: Name of a batch → the sample's own; empty: all, under their own names.
        ahead: Bounds of the read-ahead. It is for remote files; those of this node are read when needed.
    """

    def __init__(
        self,
        shards: ShardFormat,
        storage: Storage,
        *,
        columns: Mapping[str, str] = {},
        ahead: ReadAheadConfig = ReadAheadConfig(),
    ) -> None:
        self._shards = shards
        self._columns = dict(columns)
        self._storage = storage
        self._ends = np.cumsum(shards.counts)
        self._begins = self._ends - shards.counts
        self.blocks = tuple(int(count) for count in shards.counts)
        self.digest = hashlib.sha256(shards.identity()).hexdigest()
        self._ahead = ReadAhead(self._raw, ahead) if storage.source.cached else None
        self._foresight: _ShardForesight | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - int(self._begins[shard])

    def _raw(self, index: int) -> bytes:
        return self._shards.raw(*self._place(index))

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """The sample: name → number, array, text or what JSON gives.

        Raises:
            UnreadableSample: its bytes are no sample; with the shard and the sample's key.
            Unavailable: the store does not answer.
            BadData: a file is missing, forbidden, or has changed.
        """
        shard, sample = self._place(index)
        data = self._bytes(index)
        try:
            return self._shards.decode(shard, sample, data, self._columns)
        except DmscError:
            raise
        except MemoryError:
            raise
        except Exception as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise UnreadableSample(
                f"{self._shards.name(shard)}: {self._shards.key(shard, sample)} can't be read: {why}"
            ) from None

    def _bytes(self, index: int) -> bytes:
        return self._raw(index) if self._ahead is None else self._ahead.take(index)

    @property
    def held_bytes(self) -> int:
        """Bytes of the source in memory: blocks that are not on disk, and samples that were read ahead."""
        return self._storage.memory.held_bytes + (0 if self._ahead is None else self._ahead.ready_bytes)

    @property
    def reads_ahead(self) -> bool:
        return self._ahead is not None

    def expect(self, indices: Sequence[int]) -> None:
        """These samples are needed soon, in this order."""
        if self._ahead is not None:
            self._ahead.expect(indices)

    def follow(self, upcoming: Upcoming) -> None:
        """From now on what is kept on disk goes by this order; `reached` says how far it has come."""
        if self._storage.source.cached and len(self):
            self._foresight = _ShardForesight(self._shards, self._storage, upcoming, len(self))

    def reached(self, position: int) -> None:
        """The samples at this position of the order are being made."""
        if self._foresight is not None:
            self._foresight.reached(position)

    def close(self) -> None:
        """Frees threads, connections and what was published. Idempotent."""
        if self._ahead is not None:
            self._ahead.close()
        if self._foresight is not None:
            self._foresight.close()
        self._storage.close()


class RowSamples(ShardSamples):
    """Samples whose columns have fixed sizes, so that a batch of them is made at once."""

    def gather(self, indices: Sequence[int]) -> Mapping[str, Any]:
        """Name → (len(indices), …). Raises as `__getitem__` does."""
        if self._ahead is None and indices:
            found = self._shards.read_rows(self._places(indices), self._columns)
            if found is not None:
                return found
        rows = [self._bytes(index) for index in indices]
        for index, row in zip(indices, rows, strict=True):
            if len(row) != self._shards.row_bytes:
                shard, sample = self._place(index)
                raise UnreadableSample(
                    f"{self._shards.name(shard)}: {self._shards.key(shard, sample)} has {len(row):,} bytes, "
                    f"not {self._shards.row_bytes:,}"
                )
        return self._shards.rows(rows, self._columns)

    def _places(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        if not 0 <= min(indices) <= max(indices) < len(self):
            return [self._place(index) for index in indices]
        wanted = np.asarray(indices, dtype=np.int64)
        shards = self._ends.searchsorted(wanted, side="right")
        return list(zip(shards.tolist(), (wanted - self._begins[shards]).tolist(), strict=True))


class TransformedShardSamples(ShardSamples):
    """Samples that the user's function changes: it gets all columns, and `columns` choose of what it returns.

    Args:
        shards, storage, columns, ahead: As of `ShardSamples`.
        transform: `module:callable`, from a mapping to one.
        at: The source's key in the job file.
    """

    def __init__(
        self,
        shards: ShardFormat,
        storage: Storage,
        *,
        transform: str,
        at: str,
        columns: Mapping[str, str] = {},
        ahead: ReadAheadConfig = ReadAheadConfig(),
    ) -> None:
        super().__init__(shards, storage, ahead=ahead)
        self._users, self._chosen = load(transform), dict(columns)
        self._what, self._at = f"{at}.transform {transform}", at

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self.draw(index, None)

    def draw(self, index: int, seed: int | None) -> Mapping[str, Any]:
        """The sample as the user's function makes it, with generators that are seeded for it."""
        sample = dict(super().__getitem__(index))
        seed_generators(index if seed is None else seed)
        try:
            made = self._users(sample)
        except DmscError:
            raise
        except Exception as error:  # user code may raise anything
            raise BadData(f"{self._what} failed at sample {index}: {describe(error)}") from error
        if not isinstance(made, Mapping):
            raise BadData(f"{self._what} returned a {type(made).__name__}; it must return a mapping of names")
        if missing := [column for column in self._chosen.values() if column not in made]:
            raise BadData(f"{self._at}.columns: {self._what} gave no {missing[0]!r}, but {', '.join(made)}")
        return {name: made[column] for name, column in self._chosen.items()} if self._chosen else made


class _ShardForesight:
    """When the blocks of the shards' files are needed, in seconds, as the node's cache wants it.

    A sample's block is estimated by its place in its shard: exact offsets are in the shards, which nobody
    has read yet. What is kept goes by that, never what is read. Samples that are larger than a block
    share their blocks' needs: `_together` blocks in a row count as one.
    """

    def __init__(self, shards: ShardFormat, storage: Storage, upcoming: Upcoming, samples: int) -> None:
        counts, sizes = shards.counts, np.maximum(1, shards.file_bytes)
        self._sample_bytes = float(sizes.sum()) / samples
        block_bytes = storage.config.block_bytes
        self._together = max(1, -(-int(self._sample_bytes) // block_bytes))
        unit_bytes = block_bytes * self._together
        units = -(-sizes // unit_bytes)
        self._first = np.cumsum(units) - units
        shard_of = np.repeat(np.arange(len(counts)), counts)
        inside = np.arange(samples) - (np.cumsum(counts) - counts)[shard_of]
        place = ((inside + 0.5) / counts[shard_of] * sizes[shard_of]).astype(np.int64)
        self._foresight = Foresight(upcoming, self._first[shard_of] + place // unit_bytes, int(units.sum()))
        self._shards, self._storage = shards, storage
        self._opened: dict[int, RangeReader] = {}
        self._position = 0
        self._began = (time.monotonic(), 0)
        self._seconds_each = 1.0
        self._changed = threading.Event()
        self._closed = False
        if self._foresight.horizon <= AT_ONCE:
            self._foresight.renew(0)
        storage.use_of = self.use_of
        if storage.cache is not None:
            storage.cache.follow(self.next_uses)
        threading.Thread(target=self._work, name="foresight", daemon=True).start()

    def _work(self) -> None:
        """Pins all files, since a block that a former process kept is only known by its file's state; then
        looks ahead anew whenever less is seen."""
        for shard in range(len(self._shards.counts)):
            if self._closed:
                return
            with contextlib.suppress(DmscError):  # whoever needs it says so
                self._opened[shard] = self._shards.reader(shard)
            self._look_ahead()
        while not self._closed:
            self._changed.wait()
            self._changed.clear()
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self._foresight.is_short(position := self._position):
            self._foresight.renew(position)

    def reached(self, position: int) -> None:
        now = time.monotonic()
        began, first = self._began
        if position > first and now > began:
            self._seconds_each = (now - began) / (position - first)
        if position - first > RATE_OVER or position < first:
            self._began = (now, position)
        self._position = position
        if self._foresight.is_short(position):
            if self._foresight.horizon <= AT_ONCE:
                self._foresight.renew(position)
            else:
                self._changed.set()

    def _unit(self, shard: int, number: int) -> int:
        return int(self._first[shard]) + number // self._together

    def use_of(self, shard: int, number: int, length: int) -> BlockUse:
        """What the order says of a block of a shard's file, of `length` bytes."""
        uses, each_s, unit = self._foresight.at(self._position), self._seconds_each, self._unit(shard, number)
        if uses is None:
            return BlockUse(useful=lambda within_s: float(length))

        def useful(within_s: float) -> float:
            count = uses.count_before(unit, within_s / each_s)
            return float(min(length, count * self._sample_bytes / self._together))

        return BlockUse(each_s * uses.next_use(unit, after=uses.position), useful)

    def next_uses(self) -> dict[str, float]:
        """Key of each block of the files that are open → seconds until it is needed."""
        uses, each_s = self._foresight.at(self._position), self._seconds_each
        if uses is None:
            return {}
        next_uses = each_s * uses.next_uses()
        found: dict[str, float] = {}
        for shard, reader in list(self._opened.items()):
            units = self._first[shard] + np.arange(reader.blocks) // self._together
            found.update(zip(map(reader.key, range(reader.blocks)), next_uses[units].tolist(), strict=True))
        return found

    def close(self) -> None:
        self._closed = True
        self._changed.set()
