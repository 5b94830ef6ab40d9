"""How running jobs make room for a waiting one: they shrink first, and only then somebody parks.

Who has most beyond its `want` shrinks first; below it, who has most of what it wants. Who parks: weakest hold
first, then lowest priority, then least lost slot-seconds. For a job that has to be planned each is an offer,
of which its plan takes what it needs (`plan_trials.py`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from entities.queue.decision import ParkOrder, Resize, RoomOffer, RunChanges
from entities.queue.queue_rules import QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest
from entities.queue.reservations import ReservedSlots
from entities.queue.slot_pools import SlotTable

Keeping = tuple[float, float, int]
"""Who gives up a replica first: the weakest hold, then the most of what it wants, then a number."""


class Displacement:
    """What running jobs are told during one decision, and which slots come free by that.

    It looks at jobs only when it has to: most decisions displace nobody.

    Args:
        standing: how weak a job's hold on its slots is.
        displaces: whether jobs may be parked for others at all.
        lent_by: how many slots others may take back from a tenant; None: nobody has slots of its own.
    """

    def __init__(
        self,
        active: Sequence[ActiveJob],
        table: SlotTable,
        rules: QueueRules,
        standing: Callable[[ActiveJob], float],
        displaces: bool,
        now: float,
        lent_by: Callable[[str], int] | None = None,
    ) -> None:
        self._active = active
        self._lent_by = lent_by
        self._given_back: Counter[str] = Counter()
        self._table = table
        self._rules = rules
        self._standing = standing
        self._displaces = displaces
        self._now = now
        self._states: dict[str, RunChanges] = {}
        self._parkable: list[tuple[float, RunChanges]] | None = None
        self._over_time: dict[str, ParkOrder] = {}
        self.comes_at = now
        self._coming: Counter[int] = Counter()
        self._elastic: list[ActiveJob] = []
        for job in active:
            if job.leaving or job.gives_up:
                self._count_coming(job)
            elif rules.resize and job.request.elastic and not job.fixed:
                self._elastic.append(job)
        self._beyond_want: Counter[int] = Counter()
        self._beyond_least: Counter[int] = Counter()
        for job in self._elastic:
            replicas, size = job.request.replicas, job.request.replica_slots
            self._count(self._beyond_want, job.slots, (job.replicas - replicas.want) * size, 1)
            self._count(self._beyond_least, job.slots, (job.replicas - replicas.least) * size, 1)
        self._givers: dict[bool, list[Keeping]] = {}

    def _count_coming(self, job: ActiveJob) -> None:
        for slot in job.slots if job.gives_up else job.leaving:
            if (pool := self._pool(slot)) >= 0:
                self._coming[pool] += 1
        parks_at = job.parks_at if job.gives_up and job.parks_at is not None else self._now
        self.comes_at = max(self.comes_at, job.leaves_at, parks_at)

    def _count(self, counts: Counter[int], slots: Sequence[str], last: int, sign: int) -> None:
        if last > 0:
            for slot in slots[-last:]:
                counts[self._pool(slot)] += sign

    def _pool(self, slot: str) -> int:
        number = self._table.index.get(slot)
        return -1 if number is None or not self._table.is_open(number) else self._table.pool_of[number]

    def state_of(self, job: ActiveJob) -> RunChanges:
        """What a job is told in this decision."""
        state = self._states.get(job.request.job)
        if state is None:
            state = self._states[job.request.job] = RunChanges(job, job.replicas, list(job.slots))
        return state

    def promise(self, pools: Sequence[int], count: int) -> int:
        """Promises up to `count` slots that were given up earlier; returns how many."""
        left = count
        if self._coming:
            for pool in pools:
                part = min(left, self._coming[pool])
                self._coming[pool] -= part
                left -= part
        return count - left

    def coming(self, pools: Sequence[int]) -> int:
        """How many slots of these pools were given up earlier, and are promised to nobody."""
        return sum(self._coming[pool] for pool in pools)

    def coming_slots(self) -> list[str]:
        """The slots that were given up earlier."""
        leavers = (job for job in self._active if job.leaving or job.gives_up)
        return [slot for job in leavers for slot in (job.slots if job.gives_up else sorted(job.leaving))]

    # --- shrinking ----------------------------------------------------------------------------------------
    @property
    def grown(self) -> bool:
        """Whether some job has more than it wants."""
        return any(count > 0 for count in self._beyond_want.values())

    def elastic(self) -> Iterator[RunChanges]:
        """The jobs that may grow or shrink, and are not about to."""
        return (self.state_of(job) for job in self._elastic)

    def may_give(self, job: ActiveJob, tenant: str, more: int = 0) -> bool:
        """Whether a job gives up what it wants for this tenant's jobs: not what is its own tenant's.

        `more`: so many slots of its tenant go beside those that were given up.
        """
        owner = job.request.account
        return self._rules.resize and (owner == tenant or self._lends(owner, more))

    def _lends(self, owner: str, more: int) -> bool:
        """Whether others may take back slots of a tenant yet, once `more` of them are given up."""
        return self._lent_by is None or self._lent_by(owner) > self._given_back[owner] + more

    def shrink(self, missing: int, pools: Sequence[int], *, below_want: bool, claimant: JobRequest) -> int:
        """Has jobs give up slots of these pools, all that are missing or none; returns how many come free.

        `below_want`: down to their minimum, else only what they have beyond what they want. `claimant`: for
        whom.
        """
        there = self._beyond_least if below_want else self._beyond_want
        if missing > sum(there[pool] for pool in pools):
            return 0
        usable, freed, aside, given = frozenset(pools), 0, [], []
        for deep in (False, True):
            heap = self._heap(deep)
            while heap and freed < missing:
                entry = heapq.heappop(heap)
                state = self.state_of(self._elastic[entry[-1]])
                request = state.job.request
                floor = request.replicas.least if deep else request.replicas.want
                if not state.changeable or state.takes or state.replicas <= floor:
                    continue
                useful = sum(self._pool(slot) in usable for slot in state.slots[-request.replica_slots :])
                if not useful or (deep and not self.may_give(state.job, claimant.account)):
                    aside.append((deep, entry))
                    continue
                freed += useful
                self._shrink_by_one(state, f"makes room for {claimant.job}")
                given.append(state)
                heapq.heappush(heap, self._keeps(state.job, state.replicas, entry[-1], deep))
            if not below_want:
                break
        for deep, entry in aside:
            heapq.heappush(self._givers[deep], entry)
        if freed < missing:
            for state in reversed(given):
                self._keep_one_more(state)
            self._givers.clear()
            return 0
        self.comes_at = max(self.comes_at, self._now + self._rules.shrink_s)
        return freed

    def _heap(self, deep: bool) -> list[Keeping]:
        """Who may give up replicas: those that have more than their minimum (`deep`), or than they want."""
        if deep not in self._givers:
            self._givers[deep] = [
                self._keeps(job, self.state_of(job).replicas, number, deep)
                for number, job in enumerate(self._elastic)
                if job.replicas > (job.request.replicas.least if deep else job.request.replicas.want)
            ]
            heapq.heapify(self._givers[deep])
        return self._givers[deep]

    def _keeps(self, job: ActiveJob, replicas: int, number: int, deep: bool) -> Keeping:
        weakness = self._standing(job) if deep else 0.0
        return -weakness, -replicas / job.request.replicas.want, number

    def _shrink_by_one(self, state: RunChanges, reason: str) -> None:
        request, size = state.job.request, state.job.request.replica_slots
        self._count(self._beyond_least, state.slots, size, -1)
        if state.replicas > request.replicas.want:
            self._count(self._beyond_want, state.slots, size, -1)
        state.leaves += state.slots[-size:]
        state.slots = state.slots[:-size]
        state.replicas -= 1
        state.reason = reason
        self._given_back[request.account] += size

    def _keep_one_more(self, state: RunChanges) -> None:
        """The replica that it was to give up last stays."""
        request, size = state.job.request, state.job.request.replica_slots
        state.slots += state.leaves[-size:]
        del state.leaves[-size:]
        state.replicas += 1
        self._given_back[request.account] -= size
        self._count(self._beyond_least, state.slots, size, 1)
        if state.replicas > request.replicas.want:
            self._count(self._beyond_want, state.slots, size, 1)

    # --- parking ------------------------------------------------------------------------------------------
    def weakest(self) -> float | None:
        """The weakest hold of all jobs that may be parked now; None: nobody may be."""
        if not self._displaces:
            return None
        if self._parkable is None:
            ripe_at, standing = self._now - self._rules.cool_down_s, self._standing
            holds = [standing(job) for job in self._active if self._is_ripe(job, ripe_at)]
            return max(holds, default=None)
        return next((hold for hold, state in self._candidates(self._parkable)), None)

    def _is_ripe(self, job: ActiveJob, ripe_at: float) -> bool:
        rested = job.started_at <= ripe_at and job.parked_at <= ripe_at
        return rested and not job.fixed and job.parks_at is None and job.request.job not in self._over_time

    def park(
        self,
        missing: int,
        pools: Sequence[int],
        claim: float,
        claimant: JobRequest,
        why: str = "",
    ) -> int:
        """Parks jobs with a weaker hold than `claim`, and shrinks others as far as that helps.

        Returns:
            How many slots come free; 0 if that would not be enough.
        """
        usable = frozenset(pools)
        by_shrinking = self._by_shrinking(usable, claimant.account)

        def enough(victims: Sequence[RunChanges]) -> bool:
            return by_shrinking + sum(self._adds(each, usable) for each in victims) >= missing

        victims: list[RunChanges] = []
        chosen: Counter[str] = Counter()
        for hold, state in self._candidates(self._ranked()):
            if hold <= claim:
                return 0
            tenant = state.job.request.account
            if not self._lends(tenant, chosen[tenant]):
                continue  # what it has left is its own
            if self._adds(state, usable):
                victims.append(state)
                chosen[tenant] += len(state.job.slots)
                if enough(victims):
                    break
        else:
            return 0
        for state in victims[:-1]:  # those that a later one has made needless
            fewer = [each for each in victims if each is not state]
            if enough(fewer):
                victims = fewer
        freed = sum(self._useful(each.slots, usable) for each in victims)
        for state in victims:
            self.park_job(state, f"parks for {claimant.job}{why}", blocker=claimant.job)
        if freed < missing:
            freed += self.shrink(missing - freed, pools, below_want=True, claimant=claimant)
        return freed

    # --- what a plan may choose from ------------------------------------------------------------------------
    def offers(self, claimant: JobRequest, *, below_want: bool, claim: float | None) -> list[RoomOffer]:
        """What jobs may give up, in the order to be asked for: first what they have beyond `want`.

        `below_want`: down to their minimum, too. `claim`: those with a weaker hold may park; None: nobody.
        """
        found, given = list[RoomOffer](), Counter[str]()
        states = [state for state in self.elastic() if state.changeable and not state.takes]
        left = {state.job.request.job: list(state.slots) for state in states}

        def replicas(job: JobRequest) -> int:
            return (len(left[job.job]) - job.other_slots) // job.replica_slots

        for deep in (False, True) if below_want else (False,):
            heap = [
                self._keeps(state.job, replicas(state.job.request), number, deep)
                for number, state in enumerate(states)
            ]
            heapq.heapify(heap)
            while heap:
                state = states[number := heapq.heappop(heap)[-1]]
                request, size = state.job.request, state.job.request.replica_slots
                if replicas(request) <= (request.replicas.least if deep else request.replicas.want):
                    continue
                if deep and not self.may_give(state.job, claimant.account, given[request.account]):
                    continue
                slots = left[request.job]
                found.append(RoomOffer(state, tuple(slots[-size:])))
                given[request.account] += size
                del slots[-size:]
                heapq.heappush(heap, self._keeps(state.job, replicas(request), number, deep))
        for hold, state in self._candidates(self._ranked()) if claim is not None else ():
            account = state.job.request.account
            if claim is not None and hold <= claim:
                break
            if not self._lends(account, given[account]):
                continue  # what it has left is its own
            slots = left.get(state.job.request.job, state.slots)
            found.append(RoomOffer(state, tuple(slots), parks=True))
            given[account] += len(slots)
        return found

    def accept(self, offers: Sequence[RoomOffer], claimant: JobRequest, why: str) -> None:
        """Has jobs give up what they have offered."""
        parking = {id(offer.state) for offer in offers if offer.parks}
        for offer in offers:
            if offer.parks:
                self.park_job(offer.state, f"parks for {claimant.job}{why}", blocker=claimant.job)
            elif id(offer.state) not in parking:
                self._shrink_by_one(offer.state, f"makes room for {claimant.job}")
                self.comes_at = max(self.comes_at, self._now + self._rules.shrink_s)
        self._givers.clear()

    def _by_shrinking(self, usable: frozenset[int], tenant: str) -> int:
        """How many of these pools' slots jobs may give up by shrinking for a tenant."""
        if self._lent_by is None:
            return sum(self._beyond_least[pool] for pool in usable)
        found, lent = 0, dict[str, int]()
        for state in self.elastic():
            request, surplus = state.job.request, self._surplus(state)
            owner, size = request.account, request.replica_slots
            if not state.changeable or state.takes:
                continue
            if owner != tenant:
                left = lent.setdefault(owner, self._lent_by(owner) - self._given_back[owner])
                beyond = max(0, state.replicas - request.replicas.want) * size
                count = max(beyond, min(len(surplus), -(-max(0, left) // size) * size))
                lent[owner] = left - count
                surplus = surplus[len(surplus) - count :]
            found += self._useful(surplus, usable)
        return found

    def _adds(self, state: RunChanges, usable: frozenset[int]) -> int:
        """What a park would free beyond what the job would free by shrinking."""
        return self._useful(state.slots, usable) - self._useful(self._surplus(state), usable)

    def _surplus(self, state: RunChanges) -> Sequence[str]:
        request = state.job.request
        count = (state.replicas - request.replicas.least) * request.replica_slots
        return state.slots[-count:] if self._rules.resize and count > 0 else ()

    def _useful(self, slots: Iterable[str], usable: frozenset[int]) -> int:
        return sum(self._pool(slot) in usable for slot in slots)

    def _ranked(self) -> list[tuple[float, RunChanges]]:
        """Who may be parked, those that are parked first first."""
        if self._parkable is None:
            ripe_at = self._now - self._rules.cool_down_s
            ripe = [
                (-self._standing(job), job.request.priority, self._lost_slot_s(job), -job.started_at, number)
                for number, job in enumerate(self._active)
                if self._is_ripe(job, ripe_at)
            ]
            ripe.sort()
            self._parkable = [(-rank[0], self.state_of(self._active[rank[-1]])) for rank in ripe]
        return self._parkable

    def _candidates(self, ranked: list[tuple[float, RunChanges]]) -> Iterator[tuple[float, RunChanges]]:
        while ranked and not ranked[0][1].changeable:
            del ranked[0]
        return ((hold, state) for hold, state in ranked if state.changeable and not state.leaves)

    def _lost_slot_s(self, job: ActiveJob) -> float:
        """What a park costs: half a step on average until its end, the way out and the way back."""
        return len(job.slots) * (job.step_s / 2 + self._rules.park_s)

    def park_job(
        self,
        state: RunChanges,
        reason: str,
        *,
        blocker: str = "",
        held: bool = False,
        at: float | None = None,
    ) -> None:
        """Has a job park after its notice, or at `at`. `blocker`: for whom."""
        if state.job.request.elastic and state.changeable and self._rules.resize:
            replicas, size = state.job.request.replicas, state.job.request.replica_slots
            self._count(self._beyond_want, state.slots, (state.replicas - replicas.want) * size, -1)
            self._count(self._beyond_least, state.slots, (state.replicas - replicas.least) * size, -1)
        parks_at = self._now + self._rules.notice_of(state.job.request) if at is None else at
        state.parks = ParkOrder(
            job=state.job.request.job, at=parks_at, reason=reason, blocker=blocker, held=held
        )
        self._given_back[state.job.request.account] += len(state.job.slots)
        self.comes_at = max(self.comes_at, parks_at + self._rules.park_s)

    # --- jobs that have to leave, whoever waits -------------------------------------------------------------
    def over_time(self, again_at: Callable[[float], None]) -> None:
        """Parks jobs at the end of their wall time. `again_at`: asks for another decision at a time.

        Until then they hold their slots as others do, and may change their size.
        """
        for job in self._active:
            limit = job.request.wall_time_s
            if limit is None or job.parking:
                continue
            over_at = self._now + max(0.0, limit - job.ran_s)
            notice_at = over_at - self._rules.notice_of(job.request)
            reason = f"its wall time of {limit:.0f} s is over: `dmsc resume` gives it as much again"
            if self._now >= over_at:
                self.park_job(self.state_of(job), reason, held=True, at=over_at)
            elif self._now >= notice_at:
                name = job.request.job
                self._over_time[name] = ParkOrder(job=name, at=over_at, reason=reason, held=True)
            else:
                again_at(notice_at)

    def make_way(self, reserved: Sequence[ReservedSlots], again_at: Callable[[float], None]) -> None:
        """Has jobs leave slots whose reservation begins, after their notice."""
        slots = self._table.slots
        for each in reserved:
            window = each.reservation
            kept = frozenset(slots[number].slot for number in each.numbers)
            leaves_at = window.start_at - self._rules.park_s
            told = [
                (job, leaves_at - self._rules.notice_of(job.request))
                for job in self._active
                if not window.is_for(job.request) and not kept.isdisjoint(job.slots)
            ]
            first_at = min([leaves_at - self._rules.notice_s, *(notice_at for _, notice_at in told)])
            if self._now < first_at:
                again_at(first_at)
                continue
            if self._now < window.start_at:
                again_at(window.start_at)
            again_at(window.end_at)
            at = max(self._now, leaves_at)
            reason = f"reservation {window.name} for {window.job or window.tenant or 'nobody'} begins"
            for job, notice_at in told:
                if self._now >= notice_at:
                    self._vacate(job, kept, reason, window.name, at)
                else:
                    again_at(notice_at)
            if at > self._now:
                again_at(at)

    def _vacate(self, job: ActiveJob, slots: frozenset[str], reason: str, blocker: str, at: float) -> None:
        """Has a job leave these slots at `at`: it shrinks if it can, else it parks, not without notice.

        To shrink is to give up the last replicas, those that hold none of these slots included.
        """
        state, request = self.state_of(job), job.request
        if not state.changeable:
            return
        first = next((place for place, slot in enumerate(state.slots) if slot in slots), None)
        if first is None:
            return
        replicas = (first - request.other_slots) // request.replica_slots
        if not self._rules.resize or replicas < request.replicas.least:
            if job.over_time or request.job in self._over_time:
                return  # the end of its wall time comes no later than its notice would end
            at = max(at, self._now + self._rules.notice_of(request))
            self.park_job(state, reason, blocker=blocker, at=at)
        elif at <= self._now:
            while state.replicas > replicas:
                self._shrink_by_one(state, reason)

    # --- what they are told -------------------------------------------------------------------------------
    def resizes(self) -> list[Resize]:
        """What jobs that go on are told."""
        return [
            Resize(
                job=name,
                replicas=state.replicas,
                takes=tuple(state.takes),
                leaves=tuple(state.leaves),
                reason=state.reason,
            )
            for name, state in self._states.items()
            if state.parks is None and (state.takes or state.leaves)
        ]

    def parks(self) -> list[ParkOrder]:
        parks = [state.parks for state in self._states.values() if state.parks is not None]
        return [*self._over_time.values(), *parks]
