"""Which of several instances gets the next microbatch: the algorithms, behind one small interface.

A `Balancer` orders the candidates of one stage for one sender. It keeps no time and does no I/O: the binder
(`next_hop`) tells it what changed, and asks. No choice costs more than O(log candidates), since a sender may
have thousands of them (DESIGN §8); only a new table does.

| name | chooses | after |
|---|---|---|
| `expected-completion` | who is free first, unless the step would end sooner without it | its own module |
| `weighted-service-time` | shares in proportion to measured speed | Waldspurger 1995, stride scheduling |
| `power-of-two` | the less loaded of two drawn at random | Mitzenmacher 2001 |
| `least-outstanding` | who owes this sender least | the weighted least request of Envoy |
| `round-robin` | all in turn, equal counts, waiting for whose turn it is | a static split |

Another one is named `module:factory` in the job; the factory takes a seed and returns a `Balancer`.
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
"""Another cluster's instance counts as this part of its service time farther away: decides between equals."""

UNKNOWN_MS = 1.0
"""Service time of a stage of which nobody was measured yet: all are alike, whatever it is."""


@dataclass(slots=True, eq=False)
class Candidate:
    """One possible next hop, as one sender sees it.

    `link_ms` is by how much a transfer there takes longer than to the best; `wire_ms` for how long each
    microbatch occupies the link. `outstanding` are this sender's open microbatches there, `elsewhere` the
    others' by the receiver's last word. `free_at` (seconds on the sender's clock) is when all of them should
    be done. `used` is the turn of the last choice, so that equals are taken in turn, `used_at` its time.
    `version` rises with each change.
    """

    sid: str
    incarnation: str
    window: int
    weight: float = 1.0
    remote: bool = False
    service_ms: float = UNKNOWN_MS
    link_ms: float = 0.0
    wire_ms: float = 0.0
    outstanding: int = 0
    elsewhere: int = 0
    free_at: float = 0.0
    used: int = 0
    used_at: float = 0.0
    version: int = 0
    member: Member = field(init=False)
    """It, as what is bound names it."""

    def __post_init__(self) -> None:
        self.member = Member.of(self.sid, self.incarnation)

    @property
    def full(self) -> bool:
        """Whether its window has no room: it pushes back to this sender."""
        return self.outstanding >= self.window

    @property
    def load(self) -> int:
        """Microbatches open there, as far as known."""
        return self.outstanding + self.elsewhere

    @property
    def takes_ms(self) -> float:
        """Milliseconds per microbatch; a policy that halves the weight makes it count as half as fast."""
        return self.service_ms / self.weight

    @property
    def paced_ms(self) -> float:
        """Milliseconds between two microbatches: the link to it, or it, whichever is slower."""
        takes_ms, wire_ms = self.service_ms / self.weight, self.wire_ms
        return takes_ms if takes_ms >= wire_ms else wire_ms  # sooner than `max`, and asked often

    @property
    def done_ms(self) -> float:
        """Milliseconds until it has done all that is open there; others' do not come over this link."""
        computing_ms = (self.outstanding + self.elsewhere) * (self.service_ms / self.weight)
        sending_ms = self.outstanding * self.wire_ms
        return computing_ms if computing_ms >= sending_ms else sending_ms

    @property
    def far_ms(self) -> float:
        """Milliseconds until something sent now is there; a nudge keeps equals in their own cluster."""
        return self.link_ms + (REMOTE_PART * self.service_ms / self.weight if self.remote else 0.0)


class Balancer(Protocol):
    """Orders one stage's candidates for one sender."""

    def reset(self, candidates: Sequence[Candidate]) -> None:
        """These are all there are now, each with weight > 0. O(candidates)."""
        ...

    def changed(self, candidate: Candidate) -> None:
        """Its load, speed or turn has changed. O(log candidates)."""
        ...

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        """The next hop, one whose window has room; None: wait until something comes back to this sender.

        It must not wait where nothing of this sender is outstanding: nothing would wake it.

        Args:
            now: seconds on the sender's clock.
            remaining: microbatches of the step that are yet to be bound at this stage, this one included,
                by all senders together; None where the end of the step is no matter.
        """
        ...


class LazyHeap:
    """Candidates by a key, and among equals by a second one. A changed one is pushed anew; what is left of it
    is skipped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, int, Candidate]] = []
        self._pushes = 0

    def clear(self) -> None:
        self._heap.clear()

    def push(self, candidate: Candidate, key: float, then: float = 0) -> None:
        self._pushes += 1
        heappush(self._heap, (key, then, self._pushes, candidate.version, candidate))

    def top(self) -> Candidate | None:
        """The first one that is current; stays where it is."""
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
        """Drops what is outdated once there is more than `most` in all: memory stays bounded."""
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].version]
            heapify(self._heap)


class _ByKey(ABC):
    """The open candidate with the least key."""

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
        if not candidate.full:
            self._open.push(candidate, *self.key(candidate))
        self._open.compact(4 * self._count + 64)

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        return self._open.top()

    @abstractmethod
    def key(self, candidate: Candidate) -> tuple[float, float]: ...


class LeastOutstanding(_ByKey):
    """Least (outstanding + 1) / weight of this sender; equals in turn."""

    def key(self, candidate: Candidate) -> tuple[float, float]:
        return ((candidate.outstanding + 1) / candidate.weight, candidate.used)


class WeightedServiceTime(_ByKey):
    """Shares ∝ weight / service time: each choice moves a candidate on by what it takes, the one that is
    farthest behind is next. One that could not be chosen for a while does not make up for all of it."""

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
    """The one of two drawn at random that would be done sooner; both have room."""

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
        return min(
            self._random.sample(self._open, 2), key=lambda one: ((one.load + 1) * one.takes_ms, one.used)
        )


class RoundRobin:
    """All in turn, each as often as any other: it waits for whose turn it is, however slow."""

    def __init__(self, seed: int = 0) -> None:
        self._turns = LazyHeap()
        self._count = 0

    def reset(self, candidates: Sequence[Candidate]) -> None:
        self._turns.clear()
        self._count = len(candidates)
        for candidate in candidates:
            self.changed(candidate)

    def changed(self, candidate: Candidate) -> None:
        candidate.version += 1
        self._turns.push(candidate, candidate.used)
        self._turns.compact(4 * self._count + 64)

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        candidate = self._turns.top()
        return None if candidate is None or candidate.full else candidate
