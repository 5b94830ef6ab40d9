"""What is done with slots that no waiting job can use now: running jobs grow.

First those that have less than they want, by rank of their start; then whoever gains most from one replica
more, until it saves less than `least_gain` of a step. What they grow by is given up when a waiting job comes
for it, so that growth delays nobody by more than a change of size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from entities.queue.displacement import RunChanges
from entities.queue.queue_rules import QueueRules
from entities.queue.queued_job import JobRequest
from entities.queue.slot_pools import FreeSlots


def grow(
    states: Iterable[RunChanges],
    free: FreeSlots,
    barred: Callable[[RunChanges], frozenset[int]],
    room: Callable[[str], int | None],
    rules: QueueRules,
    now: float,
) -> None:
    """Gives free slots to jobs, in place.

    Args:
        states: the running jobs, and those that start now.
        free: what is free after all admissions.
        barred: numbers of slots that a job may not have.
        room: how many slots more a tenant may have; None: any number.
    """
    if not any(free.counts):
        return
    states = list(states)
    heap = [
        (_turn(state.job.request, state.replicas), number)
        for number, state in enumerate(states)
        if state.job.request.elastic and _may_grow(state, rules, now)
    ]
    heapq.heapify(heap)
    given: dict[str, int] = {}
    while heap and any(free.counts):
        _, number = heapq.heappop(heap)
        state = states[number]
        request, size = state.job.request, state.job.request.replica_slots
        left = room(request.tenant)
        if left is not None and left - given.get(request.tenant, 0) < size:
            continue
        slots = free.first(free.table.usable(request.needs), size, barred(state), ())
        if len(slots) < size:
            continue
        free.take(slots)
        names = [free.table.slots[slot].slot for slot in slots]
        given[request.tenant] = given.get(request.tenant, 0) + size
        state.takes += names
        state.slots += names
        state.replicas += 1
        state.reason = f"grows to {state.replicas} replicas into idle slots"
        if _wants_more(request, state.replicas, rules):
            heapq.heappush(heap, (_turn(request, state.replicas), number))


def _may_grow(state: RunChanges, rules: QueueRules, now: float) -> bool:
    return (
        state.changeable
        and not state.leaves
        and not state.job.request.local
        and now - state.job.resized_at >= rules.resize_pause_s
        and _wants_more(state.job.request, state.replicas, rules)
    )


def _wants_more(request: JobRequest, replicas: int, rules: QueueRules) -> bool:
    if replicas >= request.replicas.most:
        return False
    return replicas < request.replicas.want or request.gain(replicas) >= rules.least_gain


def _turn(request: JobRequest, replicas: int) -> tuple[bool, float, float]:
    """Who grows first: below `want` by submission, beyond it by the gain for each slot."""
    below = replicas < request.replicas.want
    gain = request.gain(replicas) / request.replica_slots
    return not below, request.submitted_at if below else -gain, request.submitted_at
