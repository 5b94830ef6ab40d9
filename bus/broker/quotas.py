"""Quotas of what all parties share: concurrent store queries, readers, rendezvous values. Pure.

Each broker counts for itself: with two brokers, a party may take twice as much.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import RateLimited, Refused
from schemas.limits import INACTIVE_S

STORES_AT_ONCE, STORES_OF_ONE = 96, 32
"""Most open queries to instances' stores, which may never answer: of all jobs, and of one job."""
READERS_MOST = 240
"""Most consumers that one asker may open within the time for which an unused consumer stays."""
MEETING_BYTES = 64 << 20
"""Most bytes of rendezvous values, which the server keeps in memory, that a job may write in an hour."""
VALUE_BYTES = 200
"""Overhead of a value in the server's memory, in bytes."""
MOST_PARTIES = 4_096
PIECES = 64


class BrokerQuotas:
    """The amounts that each party has taken lately.

    Args:
        readers_s: For how long a reader that was opened counts; an unused consumer stays as long.
        meeting_s: For how long a rendezvous value that was written counts.
    """

    def __init__(self, readers_s: float = INACTIVE_S, meeting_s: float = 3600.0) -> None:
        self._stores: Counter[str] = Counter()
        self._readers = Spending(READERS_MOST, readers_s)
        self._meeting = Spending(MEETING_BYTES, meeting_s)

    @contextmanager
    def asking_store(self, job: str) -> Iterator[None]:
        """Counts a store query as open until the end of the block.

        Raises:
            RateLimited: too many store queries are open, of this job or of all.
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
        """Counts a new consumer of an asker.

        Raises:
            RateLimited: the asker has opened too many.
        """
        if not self._readers.take(asker, 1, now):
            raise RateLimited(
                f"{READERS_MOST} readers were opened within {self._readers.window_s:g} s; keep them open"
            )

    def write_meeting_point(self, job: str, size: int, now: float) -> None:
        """Counts a rendezvous value of a job; `size` is the bytes of the value and its name.

        Raises:
            Refused: the job has written too much.
        """
        if not self._meeting.take(job, size + VALUE_BYTES, now):
            raise Refused(
                f"job {job} has written {MEETING_BYTES >> 20} MiB of meeting points within"
                f" {self._meeting.window_s / 60:g} min, which is more than groups of processes need"
            )


class Spending:
    """A sum over the last `window_s` seconds for each party; the party that was quiet longest is forgotten
    when there are more than `MOST_PARTIES`."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self.window_s = window_s
        self._amounts: OrderedDict[str, deque[list[float]]] = OrderedDict()

    def take(self, party: str, amount: int, now: float) -> bool:
        """Counts an amount; False if it would exceed the party's limit, and then it is not counted."""
        amounts = self._amounts.setdefault(party, deque())
        self._amounts.move_to_end(party)
        while amounts and amounts[0][0] <= now - self.window_s:
            amounts.popleft()
        if sum(piece[1] for piece in amounts) + amount > self._most:
            return False
        if amounts and now - amounts[-1][0] < self.window_s / PIECES:
            amounts[-1][1] += amount
        else:
            amounts.append([now, amount])
        if len(self._amounts) > MOST_PARTIES:
            self._amounts.popitem(last=False)
        return True
