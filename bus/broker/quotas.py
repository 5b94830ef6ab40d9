"""How much one party may take of what all share: stores asked at once, readers, meeting points. Pure.

Each broker counts for itself: of two, a party may take twice as much.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import RateLimited, Refused

STORES_AT_ONCE, STORES_OF_ONE = 96, 32
"""Questions to instances' stores, which may never answer: of all, and to one job's."""
READERS_MOST, READERS_S = 240, 60.0
"""Consumers that one asker opens within the time for which one that nobody reads from stays."""
MEETING_BYTES, MEETING_S = 64 << 20, 3600.0
"""What a job writes of meeting points, which lie in the server's memory, within this time."""
VALUE_BYTES = 200
"""What a value takes beside what is in it."""
MOST_PARTIES = 4_096
PIECES = 64


class BrokerQuotas:
    """What each party has taken lately."""

    def __init__(self) -> None:
        self._stores: Counter[str] = Counter()
        self._readers = Spending(READERS_MOST, READERS_S)
        self._meeting = Spending(MEETING_BYTES, MEETING_S)

    @contextmanager
    def asking_store(self, job: str) -> Iterator[None]:
        """
        Raises:
            RateLimited: too many questions to stores are open, of this job or of all.
        """
        if self._stores[job] >= STORES_OF_ONE or self._stores.total() >= STORES_AT_ONCE:
            raise RateLimited(f"too many questions to the stores of {job} are open; ask fewer at once")
        self._stores[job] += 1
        try:
            yield
        finally:
            self._stores[job] -= 1
            if not self._stores[job]:
                del self._stores[job]

    def open_reader(self, asker: str, now: float) -> None:
        """
        Raises:
            RateLimited: it has opened too many.
        """
        if not self._readers.take(asker, 1, now):
            raise RateLimited(f"{READERS_MOST} readers were opened within {READERS_S:g} s; keep them open")

    def write_meeting_point(self, job: str, size: int, now: float) -> None:
        """`size`: bytes of the value and its name.

        Raises:
            Refused: the job has written too much.
        """
        if not self._meeting.take(job, size + VALUE_BYTES, now):
            raise Refused(
                f"job {job} has written {MEETING_BYTES >> 20} MiB of meeting points within"
                f" {MEETING_S / 60:g} min, which is more than groups of processes need"
            )


class Spending:
    """A sum over the last `window_s` seconds, by party. Of very many the one that was quiet for longest
    is forgotten."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._taken: OrderedDict[str, deque[list[float]]] = OrderedDict()

    def take(self, party: str, amount: int, now: float) -> bool:
        """False: it would be more than the party may have, and is not counted."""
        taken = self._taken.setdefault(party, deque())
        self._taken.move_to_end(party)
        while taken and taken[0][0] <= now - self._window_s:
            taken.popleft()
        if sum(piece[1] for piece in taken) + amount > self._most:
            return False
        if taken and now - taken[-1][0] < self._window_s / PIECES:
            taken[-1][1] += amount
        else:
            taken.append([now, amount])
        if len(self._taken) > MOST_PARTIES:
            self._taken.popitem(last=False)
        return True
