"""Room for a job of which the count of free slots says too little: only a plan says whether it can start.

Its plan is tried: on what is free; on that and what others would give up, so that nobody parks for a job
that still can't start (ADR-0107); on that and what comes free by predicted ends, so that the slots that are
kept for it are those of a plan. More slots never have fewer plans, so each question is answered by a few
trials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from entities.queue.availability import Shadow
from entities.queue.decision import RoomOffer
from entities.queue.displacement import Displacement
from entities.queue.queued_job import JobRequest
from entities.queue.slot_pools import FreeSlots, SlotTable


class TrialLater(Exception):
    """A decision has tried as many plans as it may: the job is tried again in the next one."""


class SlotTrial(Protocol):
    """Plans one job. `why`: what its last trial lacked that had no plan. `searching`: one is searched now."""

    why: str
    searching: bool

    def __call__(self, replicas: int, slots: Sequence[str], *, search: bool = False) -> Sequence[str] | None:
        """Which of these slots a plan with so many replicas uses; None: there is no such plan, or not yet.

        `search`: these slots are free, so a search may begin if there is none at once.

        Raises:
            TrialLater: see there.
        """


class RoomByPlan:
    """Room for one job. `barred`: numbers of slots that it may not use; `free`: those that are free now."""

    def __init__(
        self,
        request: JobRequest,
        trial: SlotTrial,
        table: SlotTable,
        pools: Sequence[int],
        barred: frozenset[int],
        free: FreeSlots,
    ) -> None:
        self._request, self._trial = request, trial
        self._table, self._pools, self._barred = table, pools, barred
        self._free = [table.slots[number].slot for number in free.candidates(pools, barred)]

    def _plan(self, more: Iterable[str]) -> Sequence[str] | None:
        slots = [*self._free, *filter(self._usable, more)]
        if len(slots) < self._request.least_slots:
            return None
        return self._trial(self._request.replicas.least, slots)

    def _usable(self, slot: str) -> bool:
        number = self._table.index.get(slot, -1)
        return number >= 0 and number not in self._barred and self._table.pool_of[number] in self._pools

    def free_of(self, plan: Sequence[str]) -> list[int]:
        """The numbers of those slots of a plan that are free now."""
        free = set(self._free)
        return [self._table.index[slot] for slot in plan if slot in free]

    def by_leavers(self, moves: Displacement) -> Sequence[str] | None:
        """A plan with what others are leaving already."""
        coming = moves.coming_slots()
        if not coming or (plan := self._plan(coming)) is None:
            return None
        awaited = len(set(plan).difference(self._free))
        if moves.coming(self._pools) < awaited:  # it is promised to somebody who comes first
            return None
        moves.promise(self._pools, awaited)
        return plan

    def by_displacement(
        self, moves: Displacement, *, below_want: bool, claim: float | None, why: str
    ) -> Sequence[str] | None:
        """Has others shrink, and then park, as far as a plan needs it; returns that plan."""
        offers = moves.offers(self._request, below_want=below_want, claim=claim)
        found = least_prefix(len(offers), lambda count: self._plan(_slots(offers[:count])))
        if not offers or found is None:
            return None
        count, plan = found
        chosen = needed(offers[:count], plan)
        for victim in [offer for offer in chosen if offer.parks]:
            fewer = [offer for offer in chosen if offer is not victim]
            if len(fewer) == len(chosen):  # an earlier one's end has made it needless, too
                continue
            try:
                other = self._plan(_slots(fewer))
            except TrialLater:
                break
            if other is not None:
                plan, chosen = other, needed(fewer, other)
        moves.accept(chosen, self._request, why)
        return plan

    def shadow(self, later: Sequence[tuple[float, int]], now: float) -> Shadow | None:
        """When and where it starts; None: there is no plan. `later`: when which slots come free."""
        times = sorted({at for at, _ in later})
        slots = self._table.slots

        def plan(count: int) -> Sequence[str] | None:
            until = times[count - 1] if count else now
            return self._plan(slots[number].slot for at, number in later if at <= until and count)

        found = least_prefix(len(times), plan)
        if found is None:
            return None
        count, chosen = found
        numbers = frozenset(self._table.index[slot] for slot in chosen)
        spare = sum(self._table.index[slot] not in numbers for slot in self._free)
        at = times[count - 1] if count else now
        return Shadow(self._request.job, at, frozenset(self._pools), spare, numbers=numbers)


def least_prefix(count: int, plan: Callable[[int], Sequence[str] | None]) -> tuple[int, Sequence[str]] | None:
    """The fewest of `count` parts with which there is a plan, and that plan; None: not even with all."""
    found = plan(count)
    if found is None:
        return None
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if (attempt := plan(middle)) is None:
            low = middle + 1
        else:
            found, high = attempt, middle
    return high, found


def needed(offers: Sequence[RoomOffer], plan: Collection[str]) -> list[RoomOffer]:
    """The offers without which a plan lacks slots. A job gives up its last replica first."""
    wanted, kept = set(plan), list[RoomOffer]()
    deeper: set[int] = set()
    for offer in reversed(offers):
        if id(offer.state) in deeper or not wanted.isdisjoint(offer.slots):
            kept.append(offer)
            deeper.add(id(offer.state))
    return kept[::-1]


def _slots(offers: Iterable[RoomOffer]) -> list[str]:
    return [slot for offer in offers for slot in offer.slots]
