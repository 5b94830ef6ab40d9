"""What is done with slots that no waiting job can use now: running jobs grow.

First those that have less than they want, by rank of their start; then whoever gains most from one replica
more, or from the next number of them that helps, while each saves at least `least_gain` of a step. What they
grow by is given up when a waiting job comes for it: growth delays nobody by more than a change of size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from entities.queue.decision import RunChanges
from entities.queue.queue_rules import QueueRules
from entities.queue.slot_pools import FreeSlots

Turn = tuple[tuple[bool, float, float], int, int]
"""Who grows first (below `want` by submission, beyond it by gain), its number, to how many replicas."""


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
    heap: list[Turn] = []
    for number, state in enumerate(states):
        if state.job.request.elastic and _may_grow(state, rules, now):
            _push(heap, state, number, rules)
    given: dict[str, int] = {}
    while heap and any(free.counts):
        _, number, larger = heapq.heappop(heap)
        state = states[number]
        request = state.job.request
        size = (larger - state.replicas) * request.replica_slots
        left = room(request.account)
        if left is not None and left - given.get(request.account, 0) < size:
            continue
        slots = free.first(free.table.usable(request.needs), size, barred(state), ())
        if len(slots) < size:
            continue
        free.take(slots)
        names = [free.table.slots[slot].slot for slot in slots]
        given[request.account] = given.get(request.account, 0) + size
        state.takes += names
        state.slots += names
        state.replicas = larger
        state.reason = f"grows to {state.replicas} replicas into idle slots"
        _push(heap, state, number, rules)


def _push(heap: list[Turn], state: RunChanges, number: int, rules: QueueRules) -> None:
    """Has a job take its turn among those that grow, if there is a number of replicas worth growing to."""
    request, replicas = state.job.request, state.replicas
    if replicas >= request.replicas.most:
        return
    larger = request.larger(replicas, rules.least_gain)
    if larger is None:
        return
    below = replicas < request.replicas.want
    rank = request.submitted_at if below else -request.gain(replicas, larger) / request.replica_slots
    heapq.heappush(heap, ((not below, rank, request.submitted_at), number, larger))


def _may_grow(state: RunChanges, rules: QueueRules, now: float) -> bool:
    return (
        state.changeable
        and not state.leaves
        and not state.job.request.local
        and now - state.job.resized_at >= rules.resize_pause_s
    )
