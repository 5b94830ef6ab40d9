"""The broker's queue: parties take turns, so that nobody waits for another's flood or slow call. Pure.

A party may have as many calls running as there are free places (dynamic thresholds: Choudhury and Hahne,
IEEE/ACM Transactions on Networking 6(2), 1998). A single party takes half of all places, and a new party
finds some free.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PLACES = 256
"""Most calls that run at once."""
WAITING_MOST, WAITING_BYTES = 1_024, 32 << 20
"""Most waiting calls of one party, and most bytes of them; further calls are dropped, and askers repeat."""
ALL_BYTES = 96 << 20
"""Most bytes of waiting calls of all parties."""

T = TypeVar("T")


@dataclass
class _Lane(Generic[T]):
    calls: deque[tuple[T, int]] = field(default_factory=deque)
    size: int = 0


class FairQueue(Generic[T]):
    """The waiting calls and the number of running calls of each party."""

    def __init__(self, places: int = PLACES) -> None:
        self.dropped: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self._free = places
        self._size = 0
        self._lanes: OrderedDict[str, _Lane[T]] = OrderedDict()  # the next one first

    @property
    def waiting(self) -> int:
        """The number of waiting calls of all parties."""
        return sum(len(lane.calls) for lane in self._lanes.values())

    def add(self, party: str, call: T, size: int) -> bool:
        """Adds a call of `size` bytes; False if it is dropped because too much waits already."""
        lane = self._lanes.setdefault(party, _Lane())
        full = len(lane.calls) >= WAITING_MOST or lane.size + size > WAITING_BYTES
        if full or self._size + size > ALL_BYTES:
            self.dropped[party] += 1
            if not lane.calls:
                del self._lanes[party]
            return False
        lane.calls.append((call, size))
        lane.size += size
        self._size += size
        return True

    def take(self) -> tuple[str, T] | None:
        """The next call that may be made, with its party; the caller must call `done` after it."""
        for party in self._lanes:
            if self.running[party] < self._free:
                break
        else:
            return None
        lane = self._lanes[party]
        call, size = lane.calls.popleft()
        lane.size -= size
        self._size -= size
        if lane.calls:
            self._lanes.move_to_end(party)
        else:
            del self._lanes[party]
        self.running[party] += 1
        self._free -= 1
        return party, call

    def done(self, party: str) -> None:
        """Notes that a call of this party has ended."""
        self._free += 1
        self.running[party] -= 1
        if not self.running[party]:
            del self.running[party]
