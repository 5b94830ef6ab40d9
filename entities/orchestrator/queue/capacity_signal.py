"""The capacity that the queue wants, told to whoever may add nodes (ADR-0086)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.queue.mesh_slots import BITS, PRECISION, SlotFacts
from entities.queue.decision import Cause, Hold
from entities.queue.queued_job import QueuedJob, predicted_s
from entities.queue.reservations import SlotReservation, assign, barred_for
from entities.queue.slot_pools import SlotNeeds
from schemas.errors import DmscError
from schemas.queue import MOST_DEMANDS, CapacityDemand, QueueCapacity

log = get_logger("orchestrator")

NO_SLOT_HELPS = frozenset({Cause.HELD, Cause.AFTER, Cause.ARRAY, Cause.QUOTA})
"""Jobs that wait for these would wait on any number of slots."""

Supply = tuple[int, tuple[bool, ...]]
"""Free slots that are equal to all waiting jobs: their pool, and for which of the bars they are barred."""


@dataclass(kw_only=True, slots=True)
class _Demand:
    """Waiting jobs that can use the same slots. `reaches`: the supplies that it can use."""

    needs: SlotNeeds
    since: float
    jobs: int = 0
    slots: int = 0
    lacking: int = 0
    reaches: tuple[Supply, ...] = ()


def capacity_of(
    facts: SlotFacts, holds: Mapping[str, Hold], reservations: Sequence[SlotReservation], now: float
) -> QueueCapacity:
    """What has to be there beside the free slots, for all waiting jobs to start with their fewest replicas.

    A free slot serves one job only, and jobs share them out so that as few as possible are missing. Slots
    that jobs are leaving count as free.

    Args:
        facts: slots, and who waits and runs.
        holds: why jobs wait, by the last decision; one that is not in it has not been looked at yet.
        reservations: slots that are kept; they count only for those for whom they are kept.
        now: seconds since the epoch.
    """
    wanting = [job for job in facts.queue if _wants_slots(job, holds.get(job.request.job))]
    demands = _demands(facts, wanting, reservations, now)
    by_needs: dict[SlotNeeds, _Demand] = {}
    for demand in demands:
        whole = by_needs.setdefault(demand.needs, _Demand(needs=demand.needs, since=demand.since))
        whole.since = min(whole.since, demand.since)
        whole.jobs += demand.jobs
        whole.slots += demand.slots
        whole.lacking += demand.lacking
    free, total = facts.free_and_total
    missing = [demand.since for demand in by_needs.values() if demand.lacking]
    first = sorted(by_needs.values(), key=lambda demand: -demand.lacking)
    return QueueCapacity(
        slots=total,
        free=free,
        waiting=sum(not job.request.needs.lane for job in facts.queue),
        lacking=sum(demand.lacking for demand in demands),
        since=min(missing, default=None),
        demands=tuple(_as_told(demand) for demand in first[:MOST_DEMANDS]),
    )


def _wants_slots(job: QueuedJob, hold: Hold | None) -> bool:
    if job.request.needs.lane:  # builds take what others leave: nobody adds nodes for them
        return False
    if job.request.held:
        return job.request.unfit
    if hold is None:
        return True
    failed_before = hold.cause is Cause.NEVER and bool(hold.blocker)  # the job fails in a moment
    return hold.cause not in NO_SLOT_HELPS and not failed_before


def _demands(
    facts: SlotFacts, wanting: Sequence[QueuedJob], reservations: Sequence[SlotReservation], now: float
) -> list[_Demand]:
    """Those jobs by the slots that they can use, in the order of the queue, with what each kind lacks."""
    table = facts.table
    reserved = assign(reservations, table) if reservations else []
    by_slots: dict[tuple[SlotNeeds, frozenset[int]], _Demand] = {}
    for job in wanting:
        request = job.request
        until = now + predicted_s(job, request.replicas.want)
        barred = barred_for(request, reserved, now, until) if reserved else frozenset()
        key = request.needs, barred
        demand = by_slots.setdefault(key, _Demand(needs=request.needs, since=job.since))
        demand.since = min(demand.since, job.since)
        demand.jobs += 1
        demand.slots += request.least_slots
    staying = [job for job in facts.running if not job.gives_up]
    held = {slot for job in staying for slot in job.slots if slot not in job.leaving}
    bars = sorted({barred for _, barred in by_slots if barred}, key=sorted)
    supplies: Counter[Supply] = Counter(
        (table.pool_of[number], tuple(number in barred for barred in bars))
        for number, slot in enumerate(table.slots)
        if not slot.closed and slot.slot not in held
    )
    for (needs, barred), demand in by_slots.items():
        usable = set(table.usable(needs))
        place = bars.index(barred) if barred else None
        demand.reaches = tuple(
            supply for supply in supplies if supply[0] in usable and (place is None or not supply[1][place])
        )
    demands = list(by_slots.values())
    _share_out(demands, supplies)
    return demands


def _share_out(demands: Sequence[_Demand], free: Counter[Supply]) -> None:
    """Gives out as many free slots as can be used, and notes what each demand lacks then.

    A largest flow by shortest augmenting paths (Edmonds and Karp 1972): a demand may take slots that another
    one was given, if that one can use others. `free` is used up.
    """
    users: dict[Supply, Counter[int]] = {supply: Counter() for supply in free}
    for index, demand in enumerate(demands):
        demand.lacking = demand.slots
        while demand.lacking and (path := _augmenting(index, demands, free, users)):
            moved = min(demand.lacking, free[path[-1][1]])
            moved = min([moved, *(users[supply][after] for (_, supply), (after, _) in pairwise(path))])
            free[path[-1][1]] -= moved
            for (taker, supply), (giver, _) in pairwise(path):
                users[supply][giver] -= moved
                users[supply][taker] += moved
            users[path[-1][1]][path[-1][0]] += moved
            demand.lacking -= moved


def _augmenting(
    start: int, demands: Sequence[_Demand], free: Counter[Supply], users: Mapping[Supply, Counter[int]]
) -> list[tuple[int, Supply]]:
    """Who takes from which supply, so that `start` has more: each from the next one, the last a free slot.

    Empty: nothing can be had.
    """
    before: dict[int, tuple[int, Supply] | None] = {start: None}
    seen: set[Supply] = set()
    for index in (line := [start]):
        for supply in demands[index].reaches:
            if supply in seen:
                continue
            seen.add(supply)
            if free[supply]:
                path = [(index, supply)]
                while (step := before[path[0][0]]) is not None:
                    path.insert(0, step)
                return path
            for other, used in users[supply].items():
                if used and other not in before:
                    before[other] = index, supply
                    line.append(other)
    return []


def _as_told(demand: _Demand) -> CapacityDemand:
    labels = dict(demand.needs.labels)
    precision = next((key for key in labels if key.startswith(PRECISION)), PRECISION)
    bits = next((key for key in labels if key.startswith(BITS)), BITS)
    return CapacityDemand(
        device=demand.needs.kind,
        precision=precision.removeprefix(PRECISION),
        bits_class=bits.removeprefix(BITS),
        clusters=demand.needs.clusters,
        labels={key: value for key, value in labels.items() if key not in (precision, bits)},
        memory_bytes=demand.needs.memory_bytes,
        jobs=demand.jobs,
        slots=demand.slots,
        lacking=demand.lacking,
        since=demand.since,
    )


@dataclass(frozen=True, kw_only=True)
class CapacitySignalConfig:
    """When the wanted capacity is published. Times in seconds."""

    least_s: float = 1.0
    """Between two messages: whoever adds nodes needs minutes, and each message goes to all that listen."""
    repeat_s: float = 10.0
    """An unchanged message is sent again after this long: for those that came late or missed one."""

    def __post_init__(self) -> None:
        if not 0.0 < self.least_s <= self.repeat_s:
            raise ValueError(
                f"capacity: least {self.least_s} s, repeat {self.repeat_s} s: 0 < least ≤ repeat"
            )


class CapacitySignal:
    """Publishes the wanted capacity when it has changed, not too often, and now and then anyway.

    Args:
        capacity: the present one.
        looked: set by the queue whenever it has looked at mesh and jobs; cleared here.
    """

    def __init__(
        self,
        bus: Bus,
        capacity: Callable[[], Awaitable[QueueCapacity]],
        looked: asyncio.Event,
        config: CapacitySignalConfig,
    ) -> None:
        self._config = config
        self._bus = bus
        self._capacity = capacity
        self._looked = looked

    async def run(self) -> None:
        """Publishes, at first at once, until cancelled."""
        said: QueueCapacity | None = None
        again_at = 0.0
        while True:
            self._looked.clear()
            present = await self._capacity()
            if present != said or time.monotonic() >= again_at:
                try:
                    await self._bus.publish(subjects.QUEUE_CAPACITY, present)
                    said, again_at = present, time.monotonic() + self._config.repeat_s
                except DmscError as error:
                    log.info("capacity not published", code=error.code, error=error.text)
            await asyncio.sleep(self._config.least_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, again_at - time.monotonic())):
                    await self._looked.wait()
