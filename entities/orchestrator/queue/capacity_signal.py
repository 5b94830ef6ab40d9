"""The capacity that the queue wants: to whoever adds nodes (ADR-0086), by job to the provisioner (0175)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.subject_row import Subject
from entities.orchestrator.queue.mesh_slots import BITS, LEFT_BEHIND, PRECISION, SlotFacts
from entities.queue.decision import Cause, Hold
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, predicted_s
from entities.queue.reservations import SlotReservation, assign, barred_for
from entities.queue.slot_pools import MeshSlot, SlotNeeds, SlotTable
from schemas.base import Message
from schemas.errors import DmscError
from schemas.machines.demand import (
    MOST_JOBS,
    MOST_NODES,
    POOL_LABEL,
    JobDemand,
    MachineDemand,
    MachineUse,
    WantedSlots,
)
from schemas.names import node_of
from schemas.queue import MOST_DEMANDS, CapacityDemand, QueueCapacity

log = get_logger("orchestrator")

NO_SLOT_HELPS = frozenset({Cause.HELD, Cause.AFTER, Cause.ARRAY, Cause.QUOTA})
"""Jobs that wait for these would wait on any number of slots."""
OVER_SOON = frozenset({None, Cause.ROOM})
"""Why jobs wait that lack nothing any more, and that the next decision starts: None is not decided yet."""

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
    waiting: list[QueuedJob] = field(default_factory=list)


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
    facts: SlotFacts,
    wanting: Sequence[QueuedJob],
    reservations: Sequence[SlotReservation],
    now: float,
    wishes: Sequence[_Demand] = (),
) -> list[_Demand]:
    """Those jobs by the slots that they can use, in the order of the queue, with what each kind lacks.

    `wishes` get what the others leave.
    """
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
        demand.waiting.append(job)
    staying = [job for job in facts.running if not job.gives_up]
    held = {slot for job in staying for slot in job.slots if slot not in job.leaving}
    bars = sorted({barred for _, barred in by_slots if barred}, key=sorted)
    supplies: Counter[Supply] = Counter(
        (table.pool_of[number], tuple(number in barred for barred in bars))
        for number, slot in enumerate(table.slots)
        if not slot.closed and slot.slot not in held
    )
    everybody = [*by_slots.items(), *(((wish.needs, frozenset[int]()), wish) for wish in wishes)]
    for (needs, barred), demand in everybody:
        usable = set(table.usable(needs))
        place = bars.index(barred) if barred else None
        demand.reaches = tuple(
            supply for supply in supplies if supply[0] in usable and (place is None or not supply[1][place])
        )
    _share_out([demand for _, demand in everybody], supplies)
    return list(by_slots.values())


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


def demand_of(
    facts: SlotFacts, holds: Mapping[str, Hold], reservations: Sequence[SlotReservation], now: float
) -> MachineDemand:
    """What each job lacks beside the free slots, and how the slots of machines are used; of one moment.

    Of jobs that use the same slots those that come first have the free ones. Running jobs and versions wish
    for the replicas that they are to have; so do waiting ones, beyond the fewest with which they begin.

    Args:
        facts: slots, and who waits and runs.
        holds: why jobs wait, by the last decision.
        reservations: slots that are kept.
        now: seconds since the epoch.
    """
    wanting = [job for job in facts.queue if _wants_slots(job, holds.get(job.request.job))]
    wanting.sort(key=lambda job: (-job.request.priority, job.request.turn))
    wishes = {job.request.job: _wish(job.request, job.request.least_slots, job.since) for job in wanting}
    for active in facts.running:
        if _grows(active):
            kept = len(active.slots) - len(active.leaving)
            wishes[active.request.job] = _wish(active.request, kept, active.request.submitted_at)
    wishes = {job: wish for job, wish in wishes.items() if wish.slots > 0}
    demands = _demands(facts, wanting, reservations, now, list(wishes.values()))
    lacking = {job: lacks for demand in demands for job, lacks in _by_job(demand)}
    pools = _by_pool(facts.table)
    lines = []
    for request, since in [
        *((job.request, job.since) for job in wanting),
        *((active.request, active.request.submitted_at) for active in facts.running),
    ]:
        wish, lacks = wishes.get(request.job), lacking.get(request.job, 0)
        wished = 0 if wish is None else wish.lacking
        waits = request.job in lacking
        hold = holds.get(request.job)
        if not (lacks or wished or (waits and (None if hold is None else hold.cause) in OVER_SOON)):
            continue
        reason = (
            f"is to have {request.replicas.want} replicas"
            if not waits
            else ""
            if hold is None
            else hold.reason
        )
        lines.append(
            JobDemand(
                job=request.job,
                priority=request.priority,
                since=since,
                needs=_wanted(request.needs),
                slots=request.least_slots,
                lacking=lacks,
                wished=wished,
                waits=waits,
                unfit_pools=_unfit(facts.table, pools, request.needs),
                reason=reason,
            )
        )
    return MachineDemand(
        jobs=tuple(lines[:MOST_JOBS]), more=max(0, len(lines) - MOST_JOBS), nodes=_uses(facts)
    )


def _wish(request: JobRequest, present: int, since: float) -> _Demand:
    """What it is to have beyond `present` slots."""
    wanted = request.slots(request.replicas.want)
    return _Demand(needs=request.needs, since=since, jobs=1, slots=max(0, wanted - present))


def _grows(job: ActiveJob) -> bool:
    """Whether a job that holds slots may be given more."""
    ends = job.work_s == 0.0 or job.parking
    return bool(job.slots) and job.request.job != LEFT_BEHIND and not job.request.needs.lane and not ends


def _by_job(demand: _Demand) -> list[tuple[str, int]]:
    """What each of its jobs lacks: the first ones have what there is."""
    there, found = demand.slots - demand.lacking, []
    for job in demand.waiting:
        used = min(there, job.request.least_slots)
        there -= used
        found.append((job.request.job, job.request.least_slots - used))
    return found


def _by_pool(table: SlotTable) -> dict[str, set[int]]:
    """The table's pools of equal slots, by the name of the machines' pool that they belong to."""
    found: dict[str, set[int]] = {}
    for number, slots in enumerate(table.pools):
        slot = table.slots[slots[0]]
        if (name := dict(slot.labels).get(POOL_LABEL)) and not slot.lane:
            found.setdefault(name, set()).add(number)
    return found


def _unfit(table: SlotTable, pools: Mapping[str, set[int]], needs: SlotNeeds) -> tuple[str, ...]:
    """The machines' pools whose slots are none for these needs, as far as there are any."""
    return tuple(
        name
        for name, numbers in sorted(pools.items())
        if not any(needs.admit(table.slots[table.pools[number][0]]) for number in numbers)
    )


def _uses(facts: SlotFacts) -> tuple[MachineUse, ...]:
    """The nodes that say from which pool they are, with what is held of them."""
    taken = Counter(
        facts.table.slots[facts.table.index[slot]].node
        for job in facts.running
        for slot in job.slots
        if slot in facts.table.index
    )
    nodes: dict[str, list[MeshSlot]] = {}
    for slot in facts.table.slots:
        if not slot.lane and POOL_LABEL in dict(slot.labels):
            nodes.setdefault(slot.node, []).append(slot)
    return tuple(
        MachineUse(
            sid=sid,
            node=node_of(sid, slots[0].cluster),
            pool=dict(slots[0].labels)[POOL_LABEL],
            slots=len(slots),
            taken=taken[sid],
            cordoned=all(slot.closed for slot in slots),
        )
        for sid, slots in sorted(nodes.items())[:MOST_NODES]
    )


def _wanted(needs: SlotNeeds) -> WantedSlots:
    labels = dict(needs.labels)
    precision = next((key for key in labels if key.startswith(PRECISION)), PRECISION)
    bits = next((key for key in labels if key.startswith(BITS)), BITS)
    return WantedSlots(
        device=needs.kind,
        precision=precision.removeprefix(PRECISION),
        bits_class=bits.removeprefix(BITS),
        clusters=needs.clusters,
        labels={key: value for key, value in labels.items() if key not in (precision, bits)},
        memory_bytes=needs.memory_bytes,
    )


def _as_told(demand: _Demand) -> CapacityDemand:
    needs = _wanted(demand.needs)
    return CapacityDemand(
        device=needs.device,
        precision=needs.precision,
        bits_class=needs.bits_class,
        clusters=needs.clusters,
        labels=needs.labels,
        memory_bytes=needs.memory_bytes,
        jobs=demand.jobs,
        slots=demand.slots,
        lacking=demand.lacking,
        since=demand.since,
    )


@dataclass(frozen=True, kw_only=True)
class CapacitySignalConfig:
    """When the wanted capacity is published. Times in seconds."""

    least_s: float = 0.2
    """Between two messages: each goes to all that listen. A submission changes the queue more than once."""
    share: float = 0.1
    """Of the time that is spent on finding out what is wanted: with many jobs messages are rarer."""
    repeat_s: float = 10.0
    """An unchanged message is sent again after this long: for those that came late or missed one."""
    settle_s: float = 10.0
    """At most so long after its start a leader tells no machine demand, until it knows all nodes and jobs.

    It would take the slots of the others for slots that are lacking, or machines for idle ones.
    """

    def __post_init__(self) -> None:
        if not (0.0 < self.least_s <= self.repeat_s and 0.0 < self.share <= 1.0):
            raise ValueError(
                f"capacity: least {self.least_s} s, repeat {self.repeat_s} s, share {self.share}:"
                " 0 < least ≤ repeat, 0 < share ≤ 1"
            )


class CapacitySource(Protocol):
    """What the queue tells of its capacity."""

    looked: asyncio.Event
    """Set whenever it has looked at mesh and jobs; cleared by who waits for it."""

    def settled(self) -> bool:
        """Whether nodes and jobs that an earlier leader knew are known again."""

    async def capacity(self) -> tuple[QueueCapacity, MachineDemand]:
        """The present capacity, and the same by job for the provisioner."""


class CapacitySignal:
    """Publishes what is wanted when it has changed, not too often, and now and then anyway.

    Args:
        queue: whose capacity it is.
    """

    def __init__(self, bus: Bus, queue: CapacitySource, config: CapacitySignalConfig) -> None:
        self._config = config
        self._bus = bus
        self._queue = queue

    async def run(self) -> None:
        """Publishes, at first at once, until cancelled."""
        rows: tuple[Subject, ...] = (subjects.QUEUE_CAPACITY, subjects.MACHINE_DEMAND)
        said: dict[Subject, Message] = {}
        again_at, settled = 0.0, False
        settled_at = time.monotonic() + self._config.settle_s
        while True:
            self._queue.looked.clear()
            began = time.monotonic()
            settled = settled or self._queue.settled() or began >= settled_at
            present = dict(zip(rows, await self._queue.capacity(), strict=True))
            if not settled:
                del present[subjects.MACHINE_DEMAND]
            due = (now := time.monotonic()) >= again_at
            pause_s = max(self._config.least_s, (now - began) * (1.0 / self._config.share - 1.0))
            try:
                for row, message in present.items():
                    if due or said.get(row) != message:
                        await self._bus.publish(row, message)
                        said[row] = message
                if due:
                    again_at = time.monotonic() + self._config.repeat_s
            except DmscError as error:
                log.info("capacity not published", code=error.code, error=error.text)
            await asyncio.sleep(min(pause_s, self._config.repeat_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, again_at - time.monotonic())):
                    await self._queue.looked.wait()
