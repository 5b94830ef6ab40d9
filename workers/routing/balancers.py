"""Balancing algorithms: which of several instances gets the next microbatch, behind one small interface.

A `Balancer` orders the candidates of one stage for one sender. It has no clock and does no I/O: the binder
(`next_hop`) reports changes to it and asks for a choice. A choice costs at most O(log candidates), since a
sender may have thousands of them (DESIGN §8); only a new table costs more.

| name | chooses | source |
|---|---|---|
| `expected-completion` | the first to be free, unless the step would end sooner without it | its own module |
| `weighted-service-time` | shares in proportion to measured speed | Waldspurger 1995, stride scheduling |
| `power-of-two` | the less loaded of two drawn at random | Mitzenmacher 2001 |
| `least-outstanding` | the one with the fewest open microbatches of this sender | Envoy's weighted least
request | | `round-robin` | all in turn, equal counts; waits for the one whose turn it is | a static split |

A job may name its own algorithm as `module:factory`; the factory takes a seed and returns a `Balancer`.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from schemas.step import Member

REMOTE_PART = 0.05
"""An instance of another cluster counts as farther away by this share of its service time: breaks ties."""

UNMEASURED = 1.0
"""Milliseconds of service time in a stage where no instance was measured yet: all are equal, so the value is
arbitrary."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One possible next hop, as one sender sees it.

    `link_ms` is how much longer a transfer there takes than over the sender's best link; `wire_ms` how long
    each microbatch occupies the link. `outstanding` counts this sender's open microbatches there, `elsewhere`
    other senders' by the receiver's last report. `free_at` (seconds on the sender's clock) is when all of
    them should be done. `used` is the turn of the last choice, so that equals are taken in turn, and
    `used_at` its time; `rank` is the same, dealt anew for each step (`Binder`). `version` rises with each
    change.
    """

    sid: str
    incarnation: str
    window: int
    weight: float = 1.0
    remote: bool = False
    service_ms: float = UNMEASURED
    link_ms: float = 0.0
    wire_ms: float = 0.0
    outstanding: int = 0
    elsewhere: int = 0
    free_at: float = 0.0
    used: int = 0
    rank: int = 0
    used_at: float = 0.0
    version: int = 0
    member: Member = field(init=False)
    """The candidate's incarnation, as a binding names it."""

    def __post_init__(self) -> None:
        self.member = Member.of(self.sid, self.incarnation)

    @property
    def full(self) -> bool:
        """Whether its window has no room for this sender (backpressure)."""
        return self.outstanding >= self.window

    @property
    def load(self) -> int:
        """Microbatches open there, as far as this sender knows."""
        return self.outstanding + self.elsewhere

    @property
    def takes_ms(self) -> float:
        """Milliseconds per microbatch; half the weight (set by a policy) makes it count as half as fast."""
        return self.service_ms / self.weight

    @property
    def paced_ms(self) -> float:
        """Milliseconds between two microbatches: of the instance or its link, whichever is slower."""
        takes_ms, wire_ms = self.service_ms / self.weight, self.wire_ms
        return takes_ms if takes_ms >= wire_ms else wire_ms  # faster than `max`, in a hot path

    @property
    def done_ms(self) -> float:
        """Milliseconds until all microbatches open there are done; only this sender's use its link."""
        computing_ms = (self.outstanding + self.elsewhere) * (self.service_ms / self.weight)
        sending_ms = self.outstanding * self.wire_ms
        return computing_ms if computing_ms >= sending_ms else sending_ms

    @property
    def far_ms(self) -> float:
        """Extra milliseconds until a microbatch sent now arrives; includes the tie-breaker `REMOTE_PART`."""
        return self.link_ms + (REMOTE_PART * self.service_ms / self.weight if self.remote else 0.0)


class Balancer(Protocol):
    """Orders one stage's candidates for one sender."""

    def reset(self, candidates: Sequence[Candidate]) -> None:
        """Replaces all candidates; each has weight > 0. O(candidates)."""
        ...

    def changed(self, candidate: Candidate) -> None:
        """Takes a change of a candidate's load, speed or turn. O(log candidates)."""
        ...

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        """The next hop, whose window has room; None: wait until a microbatch returns to this sender.

        It must not wait while no microbatch of this sender is outstanding: nothing would wake it.

        Args:
            now: Seconds on the sender's clock.
            remaining: Microbatches of the step that all senders together have yet to bind at this stage,
                this one included; None if the end of the step does not matter.
        """
        ...


class LazyHeap:
    """A heap of candidates, ordered by a key and then by a second one.

    A changed candidate is pushed again; its outdated entries are skipped when they reach the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, int, Candidate]] = []
        self._pushes = 0

    def clear(self) -> None:
        self._heap.clear()

    def push(self, candidate: Candidate, key: float, then: float = 0) -> None:
        self._pushes += 1
        heappush(self._heap, (key, then, self._pushes, candidate.version, candidate))

    def top(self) -> Candidate | None:
        """The first candidate with a current entry; it stays in the heap."""
        heap = self._heap
        while heap:
            _, _, _, version, candidate = heap[0]
            if version == candidate.version:
                return candidate
            heappop(heap)
        return None

    def pop(self) -> Candidate | None:
        candidate = self.top()
        if candidate is not None:
            heappop(self._heap)
        return candidate

    def compact(self, most: int) -> None:
        """Drops outdated entries once the heap has more than `most`, which bounds its memory."""
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].version]
            heapify(self._heap)


class _ByKey(ABC):
    """Chooses the candidate with the least key among those with room."""

    skips_full = True
    """Whether a candidate without room loses its turn to the next one."""

    def __init__(self, seed: int = 0) -> None:
        self._open = LazyHeap()
        self._count = 0

    def reset(self, candidates: Sequence[Candidate]) -> None:
        self._open.clear()
        self._count = len(candidates)
        for candidate in candidates:
            self.changed(candidate)

    def changed(self, candidate: Candidate) -> None:
        candidate.version += 1
        if not (self.skips_full and candidate.full):
            self._open.push(candidate, *self.key(candidate))
        self._open.compact(4 * self._count + 64)

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        return self._open.top()

    @abstractmethod
    def key(self, candidate: Candidate) -> tuple[float, float]: ...


class LeastOutstanding(_ByKey):
    """Chooses the least (outstanding + 1) / weight of this sender; equals in turn."""

    def key(self, candidate: Candidate) -> tuple[float, float]:
        return ((candidate.outstanding + 1) / candidate.weight, candidate.used)


class WeightedServiceTime(_ByKey):
    """Gives shares ∝ weight / service time (stride scheduling).

    Each choice advances a candidate's pass by its service time, and the candidate with the least pass is
    next. One that had no room for a while does not make up for all of it.
    """

    def reset(self, candidates: Sequence[Candidate]) -> None:
        self._passes = {candidate.sid: candidate.takes_ms for candidate in candidates}
        self._turns = {candidate.sid: candidate.used for candidate in candidates}
        self._reached = 0.0
        super().reset(candidates)

    def changed(self, candidate: Candidate) -> None:
        step = candidate.takes_ms
        if candidate.used != self._turns[candidate.sid]:
            self._turns[candidate.sid] = candidate.used
            self._reached = max(self._reached, self._passes[candidate.sid] - step)
            self._passes[candidate.sid] += step
        self._passes[candidate.sid] = max(self._passes[candidate.sid], self._reached)
        super().changed(candidate)

    def key(self, candidate: Candidate) -> tuple[float, float]:
        return (self._passes[candidate.sid], candidate.used)


class PowerOfTwo:
    """Draws two candidates with room at random and chooses the one that would be done sooner."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._open: list[Candidate] = []
        self._index: dict[str, int] = {}

    def reset(self, candidates: Sequence[Candidate]) -> None:
        self._open = []
        self._index = {}
        for candidate in candidates:
            self.changed(candidate)

    def changed(self, candidate: Candidate) -> None:
        at = self._index.get(candidate.sid)
        if candidate.full and at is not None:
            last = self._open.pop()
            del self._index[candidate.sid]
            if last is not candidate:
                self._open[at] = last
                self._index[last.sid] = at
        elif not candidate.full and at is None:
            self._index[candidate.sid] = len(self._open)
            self._open.append(candidate)

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        if len(self._open) < 2:
            return self._open[0] if self._open else None
        pair = self._random.sample(self._open, 2)
        return min(pair, key=lambda candidate: ((candidate.load + 1) * candidate.takes_ms, candidate.used))


class RoundRobin(_ByKey):
    """Takes all in turn, each equally often: waits for the one whose turn it is, however slow it is."""

    skips_full = False

    def key(self, candidate: Candidate) -> tuple[float, float]:
        return (candidate.used, 0)

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        candidate = self._open.top()
        return None if candidate is None or candidate.full else candidate
