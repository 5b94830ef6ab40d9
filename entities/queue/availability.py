"""When slots come free: what the first job without room waits for, and what it leaves to others (EASY)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from entities.queue.decision import Hold
from entities.queue.queued_job import ActiveJob, QueuedJob
from entities.queue.slot_pools import SlotTable

Return = tuple[float, int, int]
"""At which time how many slots of which pool come free: (time, pool, count)."""


@dataclass(slots=True)
class Shadow:
    """`at`: when the first job without room starts; infinity if nobody knows, and then nobody passes.

    `pools`: those that it may use; `spare`: how many of their slots it will leave. A later job may take free
    slots if it ends before `at`, or takes from these pools no more than `spare`. `everywhere`: it holds back
    those that use other pools, too. `numbers`: the slots of its plan, if it was planned: others may have any
    other ones.
    """

    job: str
    at: float
    pools: frozenset[int]
    spare: int
    everywhere: bool = False
    numbers: frozenset[int] | None = None


def slot_returns(
    active: Iterable[ActiveJob], table: SlotTable, shrinks: Callable[[ActiveJob], bool], now: float
) -> list[tuple[float, int]]:
    """When which slots that are held come free, by their numbers; those that are closed or away do not.

    What a job that `shrinks` has beyond its minimum counts as free now: it is given up once that helps.
    """
    found = []
    for job in active:
        ends_at = job.ends_at(now)
        firm = len(job.slots) - _surplus(job, shrinks)
        for place, slot in enumerate(job.slots):
            if (number := table.index.get(slot, -1)) < 0 or not table.is_open(number):
                continue
            at = ends_at if place < firm else now
            found.append((min(at, job.leaves_at) if slot in job.leaving else at, number))
    return found


def returns(
    active: Iterable[ActiveJob],
    table: SlotTable,
    shrinks: Callable[[ActiveJob], bool],
    barred: frozenset[int],
    now: float,
) -> list[Return]:
    """As `slot_returns`, in numbers of each pool, without slots that are `barred`."""
    if barred or len(table.pools) > 1:
        there = slot_returns(active, table, shrinks, now)
        return [(at, table.pool_of[number], 1) for at, number in there if number not in barred]
    found = list[Return]()
    for job in active:  # thousands of them on one pool are counted
        if job.leaving:
            found += ((at, 0, 1) for at, _ in slot_returns([job], table, shrinks, now))
            continue
        surplus = _surplus(job, shrinks)
        found.append((job.ends_at(now), 0, len(job.slots) - surplus))
        if surplus:
            found.append((now, 0, surplus))
    return found


def _surplus(job: ActiveJob, shrinks: Callable[[ActiveJob], bool]) -> int:
    """How many slots a job has beyond its minimum, if it may still be told to give them up."""
    request = job.request
    if not request.elastic or job.leaving or job.gives_up or job.fixed or not shrinks(job):
        return 0
    return max(0, job.replicas - request.replicas.least) * request.replica_slots


def shadow(
    job: str, needed: int, pools: Sequence[int], free: int, later: Sequence[Return], now: float
) -> Shadow:
    """When `needed` slots of these pools will be free; `free`: those that are now."""
    usable = frozenset(pools)
    heap = [each for each in later if each[1] in usable]
    heapq.heapify(heap)
    at = now
    while free < needed and heap:
        at, _, count = heapq.heappop(heap)
        free += count
    if free < needed:
        return Shadow(job, math.inf, usable, 0)
    while heap and heap[0][0] <= at:
        free += heapq.heappop(heap)[2]
    return Shadow(job, at, usable, free - needed)


def delays(
    heads: Collection[Shadow], ends_at: float, numbers: Sequence[int], table: SlotTable
) -> Shadow | None:
    """The job without room that a job with these slots would delay, if any."""
    for each in heads:
        if ends_at <= each.at and not math.isinf(each.at):
            continue
        if each.numbers is not None:
            if not each.numbers.isdisjoint(numbers):
                return each
            continue
        if sum(table.pool_of[number] in each.pools for number in numbers) > each.spare:
            return each
    return None


@dataclass(slots=True)
class QueueGate:
    """What keeps back all jobs with the same needs behind a head, so that each takes a microsecond.

    `free`: free slots; `window_s`: until the head starts; `spare`: slots that it will leave to others;
    `total`: slots, free or not: who needs more waits for nobody, and is told so.
    """

    total: int
    free: float
    window_s: float
    spare: float
    hold: Hold

    def shuts_out(self, job: QueuedJob) -> bool:
        least = job.request.least_slots
        if least > self.total:
            return False
        return least > self.free or (job.shortest_s > self.window_s and least > self.spare)
