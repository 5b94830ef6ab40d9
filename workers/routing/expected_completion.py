"""Expected completion: who is free first gets the microbatch, unless the step would end sooner without it.

A step is over when its slowest microbatch is, so a slow instance is worth its work in the middle of a step
and a loss at its end. For each candidate i with room,

    completion_i = max(now, free_at_i) + transfer_i + service_i
    without_i    = (remaining + Σ_{j≠i} load_j) / Σ_{j≠i} 1/pace_j

say when i would be done with this microbatch, and when the others would be done with all that is left, where
pace is the service time, or the time for which a microbatch occupies the link if that is longer. Who
can begin first is taken if completion_i ≤ without_i: with much left that keeps everybody busy, slow ones too
(list scheduling; Graham 1969), near the end it leaves out whoever would hold the step up. If that leaves
nobody, the earliest completion is taken, or, where a full window promises an earlier one, waited for.

Somebody who is left out for long is measured no more, and might have recovered: it is tried again when what
that may cost the step is no more than `TRIAL_PART` of the time since it was last used.

Times are sums over what is open, so they need no clock beside `now`: `free_at` is absolute, and a receiver's
last word drains by itself as time goes by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.routing.balancers import Candidate, LazyHeap

TRIES = 4
"""Candidates looked at near the end of a step before the best of them is taken: bounds a choice."""


TRIAL_PART = 0.02
"""What trying an instance that is left out may cost, as a part of the time between two trials. More finds a
recovery sooner."""


class ExpectedCompletion:
    """See the module. Idle candidates are taken fastest first, equals in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._idle = LazyHeap()
        self._busy = LazyHeap()
        self._full = LazyHeap()
        self._news: dict[str, Candidate] = {}
        self._counted: dict[str, tuple[float, int]] = {}
        self._rate = 0.0  # microbatches per millisecond, all together
        self._load = 0
        self._changes = 0

    def reset(self, candidates: Sequence[Candidate]) -> None:
        for heap in (self._idle, self._busy, self._full):
            heap.clear()
        self._counted.clear()
        self._rate, self._load = 0.0, 0
        self._news = {candidate.sid: candidate for candidate in candidates}

    def changed(self, candidate: Candidate) -> None:
        """Its place is found at the next choice: until then it mostly changes several times."""
        self._news[candidate.sid] = candidate

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        if self._news:
            self._take_in(now)
        heap, candidate = self._first(now)
        if candidate is None or remaining is None or self._late_ms(candidate, now, remaining) <= 0:
            return candidate
        return self._chosen_late(heap, candidate, now, remaining)

    def _chosen_late(
        self, heap: LazyHeap, candidate: Candidate | None, now: float, remaining: int
    ) -> Candidate | None:
        """The step's end is near: the first whom it does not wait for, or the best of some."""
        passed: list[Candidate] = []
        chosen: Candidate | None = None
        while candidate is not None:
            passed.append(candidate)
            heap.pop()
            if len(passed) == TRIES:
                break
            heap, candidate = self._first(now)
            if candidate is not None and self._late_ms(candidate, now, remaining) <= 0:
                chosen = candidate
                break
        if chosen is None:
            best = min(passed, key=lambda one: _completion_ms(one, now))
            awaited = self._full.top()
            if awaited is None or _awaited_ms(awaited, now) >= _completion_ms(best, now):
                chosen = best
        for one in passed:
            self._put(one, now)
        return chosen

    def _take_in(self, now: float) -> None:
        """Puts whoever has changed since the last choice where it belongs now."""
        counted, put = self._counted, self._put
        all_rate, all_load = self._rate, self._load
        for sid, candidate in self._news.items():
            candidate.version += 1
            load = candidate.outstanding + candidate.elsewhere
            rate = 1.0 / candidate.paced_ms
            before = counted.get(sid)
            if before is not None:
                all_rate -= before[0]
                all_load -= before[1]
            counted[sid] = (rate, load)
            all_rate += rate
            all_load += load
            if candidate.outstanding >= candidate.window:
                self._full.push(candidate, candidate.free_at + candidate.takes_ms / 1e3)
            else:
                put(candidate, now)
        self._rate, self._load = all_rate, all_load
        self._changes += len(self._news)
        self._news.clear()
        if self._changes > 64:
            self._changes = 0
            for heap in (self._idle, self._busy, self._full):
                heap.compact(4 * len(counted) + 64)

    def _first(self, now: float) -> tuple[LazyHeap, Candidate | None]:
        """Who can begin first, on top of which heap; among idle ones the fastest, then in turn."""
        busy = self._busy.top()
        while busy is not None and busy.free_at <= now:
            self._busy.pop()
            self._put(busy, now)
            busy = self._busy.top()
        idle = self._idle.top()
        if idle is None:
            return self._busy, busy
        if busy is None or now + idle.far_ms / 1e3 <= busy.free_at + busy.far_ms / 1e3:
            return self._idle, idle
        return self._busy, busy

    def _put(self, candidate: Candidate, now: float) -> None:
        free_at = candidate.free_at
        if free_at <= now:
            self._idle.push(candidate, candidate.takes_ms + candidate.far_ms, candidate.used)
        else:
            self._busy.push(candidate, free_at + candidate.far_ms / 1e3, candidate.used)

    def _late_ms(self, candidate: Candidate, now: float, remaining: int) -> float:
        """By how much it would be done after the others alone had done all that is left, beyond what a trial
        may cost."""
        rate, load = self._counted[candidate.sid]
        others = self._rate - rate
        if others <= 1e-12:
            return -math.inf
        without_ms = (remaining + self._load - load) / others
        trial_ms = TRIAL_PART * (now - candidate.used_at) * 1e3
        return _completion_ms(candidate, now) - without_ms - trial_ms


def _awaited_ms(candidate: Candidate, now: float) -> float:
    """Completion at one whose window is full. One that is late is expected to be as late again: so nobody
    waits for ever for an instance that hangs."""
    return abs(candidate.free_at - now) * 1e3 + candidate.link_ms + candidate.takes_ms


def _completion_ms(candidate: Candidate, now: float) -> float:
    wait_ms = (candidate.free_at - now) * 1e3 if candidate.free_at > now else 0.0
    return wait_ms + candidate.link_ms + candidate.takes_ms
