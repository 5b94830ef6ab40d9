"""Expected completion: the first free instance gets the microbatch, unless it would delay the step's end.

A step ends with its slowest microbatch, so a slow instance helps in the middle of a step and delays it at its
end. For each candidate i with room,

    completion_i = max(now, free_at_i) + transfer_i + service_i
    without_i    = (remaining + Σ_{j≠i} load_j) / Σ_{j≠i} 1/pace_j

are when i would be done with this microbatch, and when the others would be done with all remaining ones. The
pace is the service time, or the time for which a microbatch occupies the link if that is longer. The
candidate that can begin first is taken if completion_i ≤ without_i. While much remains, that keeps all busy,
the slow ones too (list scheduling; Graham 1969); near the end it passes over those that would delay the step.
If no candidate qualifies, the earliest completion is taken; if one with a full window promises an earlier
completion, the sender waits for it.

A candidate passed over for long is not measured any more, and might have recovered. It is tried again
when the possible delay of the step is at most `TRIAL_PART` of the time since it was last used.

Times are sums over open microbatches, so they need no clock besides `now`: `free_at` is absolute, and a
receiver's last report expires by itself as time passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workers.routing.balancers import Candidate, LazyHeap

TRIES = 4
"""Candidates considered near the end of a step before the best of them is taken: bounds a choice's cost."""


TRIAL_PART = 0.02
"""What a trial of a passed-over instance may cost, as a share of the time between two trials. A larger
share finds a recovery sooner."""


class ExpectedCompletion:
    """The algorithm of this module. Idle candidates are taken fastest first, equals by rank."""

    def __init__(self, seed: int = 0) -> None:
        self._idle = LazyHeap()
        self._busy = LazyHeap()
        self._full = LazyHeap()
        self._pending: dict[str, Candidate] = {}
        self._counted: dict[str, tuple[float, int]] = {}
        self._rate = 0.0  # microbatches per millisecond, all together
        self._load = 0
        self._changes = 0

    def reset(self, candidates: Sequence[Candidate]) -> None:
        for heap in (self._idle, self._busy, self._full):
            heap.clear()
        self._counted.clear()
        self._rate, self._load = 0.0, 0
        self._pending = {candidate.sid: candidate for candidate in candidates}

    def changed(self, candidate: Candidate) -> None:
        """Marks a candidate to be sorted again at the next choice; several changes may come before that."""
        self._pending[candidate.sid] = candidate

    def choose(self, now: float, remaining: int | None) -> Candidate | None:
        if self._pending:
            self._apply_changes(now)
        heap, candidate = self._first(now)
        if candidate is None or remaining is None or self._late_ms(candidate, now, remaining) <= 0:
            return candidate
        return self._choose_late(heap, candidate, now, remaining)

    def _choose_late(
        self, heap: LazyHeap, candidate: Candidate | None, now: float, remaining: int
    ) -> Candidate | None:
        """Near the step's end: the first candidate that does not delay it, or the best of `TRIES`."""
        candidates: list[Candidate] = []
        chosen: Candidate | None = None
        while candidate is not None:
            candidates.append(candidate)
            heap.pop()
            if len(candidates) == TRIES:
                break
            heap, candidate = self._first(now)
            if candidate is not None and self._late_ms(candidate, now, remaining) <= 0:
                chosen = candidate
                break
        if chosen is None:
            best = min(candidates, key=lambda candidate: _completion_ms(candidate, now))
            full = self._full.top()
            if full is None or _awaited_ms(full, now) >= _completion_ms(best, now):
                chosen = best
        for candidate in candidates:
            self._put(candidate, now)
        return chosen

    def _apply_changes(self, now: float) -> None:
        """Re-sorts the candidates that have changed since the last choice."""
        counted, put = self._counted, self._put
        all_rate, all_load = self._rate, self._load
        for sid, candidate in self._pending.items():
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
        self._changes += len(self._pending)
        self._pending.clear()
        if self._changes > 64:
            self._changes = 0
            for heap in (self._idle, self._busy, self._full):
                heap.compact(4 * len(counted) + 64)

    def _first(self, now: float) -> tuple[LazyHeap, Candidate | None]:
        """The candidate that can begin first, and its heap; among idle ones the fastest, equals by rank."""
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
            self._idle.push(candidate, candidate.takes_ms + candidate.far_ms, candidate.rank)
        else:
            self._busy.push(candidate, free_at + candidate.far_ms / 1e3, candidate.rank)

    def _late_ms(self, candidate: Candidate, now: float, remaining: int) -> float:
        """How much later it would be done than the others with all remaining work, less a trial's share."""
        rate, load = self._counted[candidate.sid]
        others = self._rate - rate
        if others <= 1e-12:
            return -math.inf
        without_ms = (remaining + self._load - load) / others
        trial_ms = TRIAL_PART * (now - candidate.used_at) * 1e3
        return _completion_ms(candidate, now) - without_ms - trial_ms


def _awaited_ms(candidate: Candidate, now: float) -> float:
    """Milliseconds to completion at a candidate with a full window.

    A late candidate is expected to be as late again, so that no sender waits for ever for a hanging instance.
    """
    return abs(candidate.free_at - now) * 1e3 + candidate.link_ms + candidate.takes_ms


def _completion_ms(candidate: Candidate, now: float) -> float:
    wait_ms = (candidate.free_at - now) * 1e3 if candidate.free_at > now else 0.0
    return wait_ms + candidate.link_ms + candidate.takes_ms
