"""What a cache keeps, when it is known from when each block is needed next (ADR-0048). Pure.

The order of samples is known for ever, so eviction need not guess: what is needed last goes first (Bélády,
1966), and a block that is needed later than everything that is kept is not kept. Blocks that nobody is known
to need go before all others, the oldest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

UNKNOWN = inf
"""Next use of a block that no reader is known to need."""


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """Whether a new block is kept, which blocks go for it, and why."""

    keep: bool
    evict: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """A block on disk. `bytes` of its file, `next_use` in seconds or samples from now, `age` likewise."""

    bytes: int
    next_use: float = UNKNOWN
    age: float = 0.0


@dataclass(slots=True)
class EvictionQueue:
    """The kept blocks, from the one that goes first to the one that goes last.

    It is made anew when uses have moved on: between that, the blocks at its front stay the right ones to go.
    """

    keys: list[str] = field(default_factory=list)
    uses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, kept: Mapping[str, KeptBlock]) -> EvictionQueue:
        order = sorted(kept, key=lambda key: (kept[key].next_use, kept[key].age, key))
        return cls(order, [kept[key].next_use for key in order], [kept[key].bytes for key in order])

    @property
    def furthest(self) -> float:
        """When the block is needed that goes first; 0 if none is kept."""
        return self.uses[-1] if self.uses else 0.0

    def place(self, size: int, next_use: float, room: int) -> BlockPlacement:
        """Decides on a block of `size` bytes that is needed after `next_use`, with `room` bytes free.

        Blocks in `evict` are no longer in the queue.

        Args:
            size: Bytes of its file.
            next_use: When it is needed again; `UNKNOWN`: nobody says so.
            room: Bytes that are free; negative: there are too many already.
        """
        if size <= room:
            return BlockPlacement(True, reason="there is room")
        evict: list[str] = []
        count = len(self.keys)
        while room < size and count and (self.uses[count - 1] > next_use or self.uses[count - 1] == UNKNOWN):
            count -= 1
            room += self.sizes[count]
            evict.append(self.keys[count])
        if room < size:
            return BlockPlacement(False, reason="all that is kept is needed earlier")
        del self.keys[count:], self.uses[count:], self.sizes[count:]
        return BlockPlacement(True, tuple(evict), "needed earlier than what went")

    def shrink(self, surplus: int) -> tuple[str, ...]:
        """The blocks that go so that `surplus` bytes become free; they are no longer in the queue."""
        evict: list[str] = []
        while surplus > 0 and self.keys:
            evict.append(self.keys.pop())
            self.uses.pop()
            surplus -= self.sizes.pop()
        return tuple(evict)


def worth_whole(useful_bytes: float, block_bytes: int, *, room: bool) -> bool:
    """Whether a block is fetched whole, or only the range that is asked for.

    Args:
        useful_bytes: What of it is needed before it would have to go again, this range included.
        block_bytes: Its size.
        room: Whether there is free room: then it stays, and all of it will be used.
    """
    return room or 4 * useful_bytes >= 3 * block_bytes
