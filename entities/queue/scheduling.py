"""`decide`: one look at the whole queue (ADR-0072). Pure: no clock, no randomness, no I/O.

Waiting jobs are taken in their order. Each gets the slots that it wants, or as many as are free and at least
its minimum, all at once or none. If too few are free, running jobs shrink for it; if that is not enough, jobs
with a weaker claim park for it; it starts when their exit is seen. A job that nothing of that helps is the
head of what waits: those after it start only if they do not delay it. What is still free then, running jobs
grow into.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from entities.queue.availability import QueueGate, Shadow, delays, returns, shadow, slot_returns
from entities.queue.decision import Cause, Hold, QueueDecision, RunChanges
from entities.queue.displacement import Displacement
from entities.queue.growth import grow
from entities.queue.ordering import QueueRanking
from entities.queue.plan_trials import RoomByPlan, SlotTrial, TrialLater
from entities.queue.queue_rules import Backfill, QueueOrder, QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, predicted_s
from entities.queue.reservations import SlotReservation, assign, barred_for
from entities.queue.slot_pools import FreeSlots, SlotNeeds, SlotTable
from entities.queue.tenant_shares import TenantQuota, TenantShares

MOST_DISPLACING = 16
"""Jobs for which others are asked to make room in one decision; the next decision goes on."""


@dataclass(frozen=True, kw_only=True)
class QueueSurroundings:
    """What is there beside the jobs.

    `done`: jobs that have ended, and whether well. `used_slot_s`: decayed use by tenant. `trials`: by
    job, who plans it if counts of slots do not say enough.
    """

    table: SlotTable
    rules: QueueRules = field(default_factory=QueueRules)
    reservations: tuple[SlotReservation, ...] = ()
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)
    used_slot_s: Mapping[str, float] = field(default_factory=dict)
    done: Mapping[str, bool] = field(default_factory=dict)
    trials: Mapping[str, SlotTrial] = field(default_factory=dict)


def decide(
    queue: Sequence[QueuedJob], running: Sequence[ActiveJob], around: QueueSurroundings, now: float
) -> QueueDecision:
    """What each job is told now: it starts, changes its size, parks, or waits for a reason.

    Args:
        queue: the jobs that wait, in any order.
        running: the jobs that hold slots, those that leave them included.
        around: slots, rules, reservations, quotas.
        now: seconds since the epoch, as are all times.
    """
    return _Deciding(queue, running, around, now).decide()


class _Deciding:
    """One decision on its way."""

    def __init__(
        self,
        queue: Sequence[QueuedJob],
        running: Sequence[ActiveJob],
        around: QueueSurroundings,
        now: float,
    ) -> None:
        self._queue = queue
        self._running = running
        self._around = around
        self._table = table = around.table
        self._rules = rules = around.rules
        self._now = now
        self._said = QueueDecision()
        index = table.index
        self._free = FreeSlots(table, [index.get(slot, -1) for job in running for slot in job.slots])
        self._shares = TenantShares(
            table,
            running,
            around.quotas,
            around.used_slot_s,
            rules.half_life_s,
            counts=bool(around.quotas) or rules.order is QueueOrder.FAIR,
        )
        reserved = assign(around.reservations, table)  # ended ones, too: others are beside them
        self._reserved = [each for each in reserved if each.reservation.end_at > now]
        holding = [each.reservation for each in self._reserved if each.reservation.start_at <= now]
        owners = (
            [job.request.job for job in queue if any(each.is_for(job.request) for each in holding)]
            if holding
            else []
        )
        self._ranking = QueueRanking(rules, self._shares, owners, now)
        displaces = rules.park and self._ranking.displaces
        own = rules.order is QueueOrder.FAIR and self._shares.limited
        lent_by = self._shares.borrowed if own else None
        self._moves = Displacement(running, table, rules, self._ranking.standing, displaces, now, lent_by)
        self._places = (
            {job.request.job: job.slots for job in running} if any(job.request.local for job in queue) else {}
        )
        self._arrays = Counter(job.request.array for job in running if job.request.array)
        self._starts: list[RunChanges] = []
        self._heads: list[Shadow] = []
        self._weakest: float | None = None
        self._displacing = 0
        self._holds_behind: dict[str, Hold] = {}
        self._gates: dict[int, QueueGate] = {}

    def decide(self) -> QueueDecision:
        self._moves.over_time(self._said.again_at)
        self._moves.make_way(self._reserved, self._said.again_at)
        self._weakest = self._moves.weakest()
        holds, order, checked = self._said.holds, self._said.order, bool(self._around.quotas)
        for job in self._ranking.line(self._queue):
            request = job.request
            order.append(request.job)
            hold = self._kept_back(job) if checked or request.conditional else None
            if hold is None:
                gate = self._gates.get(id(request.needs))
                if gate is None or not gate.shuts_out(job):
                    hold = self._admit(job)
                elif self._weakest is None or not self._may_displace(job):
                    hold = gate.hold
                else:
                    hold = self._admit(job)
            if hold is not None:
                holds[request.job] = hold
        if self._rules.resize:
            grow(
                [*self._moves.elastic(), *self._starts],
                self._free,
                lambda state: barred_for(
                    state.job.request, self._reserved, self._now, state.job.ends_at(self._now)
                ),
                self._shares.room,
                self._rules,
                self._now,
            )
        return self._finish()

    # --- one waiting job -----------------------------------------------------------------------------------
    def _kept_back(self, job: QueuedJob) -> Hold | None:
        """Why a job may not start even if there is room; None: nothing keeps it back."""
        request = job.request
        if request.conditional:
            if request.held:
                return Hold(cause=Cause.HELD, reason=request.held)
            for other in request.after:
                if other not in self._around.done:
                    return Hold(cause=Cause.AFTER, reason=f"starts after {other} is done", blocker=other)
                if not self._around.done[other]:
                    return Hold(
                        cause=Cause.NEVER,
                        reason=f"was to start after {other}, which was not done: submit it without that",
                        blocker=other,
                    )
            if request.array_limit and self._arrays[request.array] >= request.array_limit:
                text = f"array {request.array} has {self._arrays[request.array]} running, its limit"
                return Hold(cause=Cause.ARRAY, reason=text, blocker=request.array)
        if self._around.quotas and (excess := self._shares.excess(request)):
            return Hold(cause=Cause.QUOTA, reason=excess)
        return None

    def _admit(self, job: QueuedJob) -> Hold | None:
        """Starts the job, or has others make room for it, or says why it waits."""
        try:
            return self._looked_after(job)
        except TrialLater:
            self._said.again_at(self._now + self._rules.trial_pause_s)
            return Hold(cause=Cause.PLAN, reason="its plan is tried in a moment: no more are tried at once")

    def _looked_after(self, job: QueuedJob) -> Hold | None:
        request = job.request
        pools = self._table.usable(request.needs)
        rival = self._rival(pools) if self._heads else None
        if rival is not None and not request.local and not self._reserved:
            gate = self._gates[id(request.needs)] = self._gate(request.needs, pools, rival)
            if gate.shuts_out(job) and not self._may_displace(job):
                return gate.hold
        barred = self._barred(job, pools)
        if barred is None:
            return Hold(cause=Cause.ROOM, reason=f"no node of {', '.join(request.beside)} is free for it")
        free = self._free.count(pools, barred)
        if free >= request.least_slots:
            return self._start(job, pools, barred, free, rival)
        return self._make_room(job, pools, barred, free, rival)

    def _gate(self, needs: SlotNeeds, pools: Sequence[int], rival: Shadow) -> QueueGate:
        """Made anew whenever something has changed: see `_changed`."""
        hold, backfill = self._behind(rival), self._rules.backfill
        total = self._table.total(needs)
        if backfill is Backfill.NONE:
            return QueueGate(total, -1, math.inf, math.inf, hold)
        free = math.inf if self._moves.grown else self._free.count(pools)
        if backfill is Backfill.ANY:
            return QueueGate(total, free, math.inf, math.inf, hold)
        return QueueGate(total, free, -1 if math.isinf(rival.at) else rival.at - self._now, rival.spare, hold)

    def _changed(self) -> None:
        self._gates.clear()

    def _rival(self, pools: Sequence[int]) -> Shadow | None:
        """The first job without room that may use the same slots."""
        if len(self._heads) == 1 or self._rules.backfill is not Backfill.EASY:
            head = self._heads[0]
            return head if head.everywhere or not head.pools.isdisjoint(pools) else None
        return next((head for head in self._heads if not head.pools.isdisjoint(pools)), None)

    def _may_displace(self, job: QueuedJob) -> bool:
        return self._weakest is not None and self._weakest > self._ranking.claim(job)

    def _barred(self, job: QueuedJob, pools: Sequence[int]) -> frozenset[int] | None:
        """Slots that the job may not use now; None: it may use none."""
        request, barred = job.request, frozenset[int]()
        if self._reserved:
            run_s = predicted_s(job, request.replicas.want)
            barred = barred_for(request, self._reserved, self._now, self._now + run_s)
        if request.local:
            slots, index = self._table.slots, self._table.index
            away = {slots[index[slot]].node for other in request.apart for slot in self._on(other)}
            near = {slots[index[slot]].node for other in request.beside for slot in self._on(other)}
            if request.beside and not near:
                return None
            barred |= {
                number
                for number in self._free.candidates(pools)
                if slots[number].node in away or (near and slots[number].node not in near)
            }
        return barred

    def _on(self, job: str) -> Sequence[str]:
        return [slot for slot in self._places.get(job, ()) if slot in self._table.index]

    def _start(
        self,
        job: QueuedJob,
        pools: Sequence[int],
        barred: frozenset[int],
        free: int,
        rival: Shadow | None,
    ) -> Hold | None:
        """Starts the job with as many replicas as there is room for, unless that delays the head."""
        request = job.request
        fitting = min(request.replicas.want, self._fitting(request, free))
        replicas = request.no_faster(self._affordable(request, fitting))
        if replicas < request.replicas.want and rival is None and self._moves.grown:
            wanted = request.slots(self._affordable(request, request.replicas.want))
            self._moves.shrink(wanted - free, pools, below_want=False, claimant=request)
            self._changed()
        blocked: Hold | None = None
        closed = barred
        for count in dict.fromkeys((replicas, request.replicas.least)):
            if self._reserved and count < request.replicas.want:  # it runs longer, into other reservations
                run_s = predicted_s(job, count)
                closed = barred | barred_for(request, self._reserved, self._now, self._now + run_s)
                if self._free.count(pools, closed) < request.slots(count):
                    continue
            numbers = self._planned(request, count, pools, closed)
            if numbers is None:
                continue
            late = None
            if rival is not None and self._rules.backfill is Backfill.EASY:
                late = delays(self._heads, self._now + predicted_s(job, count), numbers, self._table)
            if late is None:
                self._begin(job, count, numbers, rival)
                return None
            blocked = Hold(
                cause=Cause.BEHIND, reason=f"it would delay {late.job}, which comes first", blocker=late.job
            )
        return blocked or self._make_room(job, pools, closed, self._free.count(pools, closed), rival)

    def _fitting(self, request: JobRequest, free: int) -> int:
        return (free - request.other_slots) // request.replica_slots

    def _affordable(self, request: JobRequest, replicas: int) -> int:
        room = self._shares.room(request.account)
        return replicas if room is None else min(replicas, self._fitting(request, room))

    def _planned(
        self, request: JobRequest, replicas: int, pools: Sequence[int], barred: frozenset[int]
    ) -> list[int] | None:
        """The slots for the job: those of a plan, or the first free ones; None: there is no plan."""
        if (trial := self._around.trials.get(request.job)) is not None:
            slots = self._table.slots
            open_to_it = [slots[number].slot for number in self._free.candidates(pools, barred)]
            chosen = trial(replicas, open_to_it, search=True)
            return None if chosen is None else [self._table.index[slot] for slot in chosen]
        rather_not = frozenset[int]()
        for each in self._reserved:
            if not each.reservation.is_for(request):
                rather_not |= each.numbers
        for head in self._heads:
            rather_not |= head.numbers or frozenset()
        return self._free.first(pools, request.slots(replicas), barred, rather_not)

    def _begin(self, job: QueuedJob, replicas: int, numbers: list[int], rival: Shadow | None) -> None:
        request = job.request
        self._free.take(numbers)
        self._changed()
        names = [self._table.slots[number].slot for number in numbers]
        self._shares.add(request.account, names)
        if request.array:
            self._arrays[request.array] += 1
        for head in self._heads:
            if self._now + predicted_s(job, replicas) > head.at:
                head.spare -= sum(self._table.pool_of[number] in head.pools for number in numbers)
        active = ActiveJob(
            request=request,
            replicas=replicas,
            slots=tuple(names),
            started_at=self._now,
            work_s=job.work_s,
            attained_slot_s=job.attained_slot_s,
            ran_s=job.ran_s,
        )
        self._starts.append(RunChanges(active, replicas, names))
        if rival is not None:
            self._starts[-1].reason = f"starts before {rival.job}, which it does not delay"
        else:
            self._starts[-1].reason = "its turn has come"

    # --- room for a job ------------------------------------------------------------------------------------
    def _make_room(
        self,
        job: QueuedJob,
        pools: Sequence[int],
        barred: frozenset[int],
        free: int,
        rival: Shadow | None,
    ) -> Hold:
        request, least = job.request, job.request.least_slots
        if least > (there := self._table.total(request.needs)):
            which = f" {request.needs}" if str(request.needs) else ""
            return Hold(
                cause=Cause.NEVER,
                reason=f"needs {least} {request.needs.places}{which}, the mesh has {there}: lower its "
                "minimum, or add nodes",
            )
        if (trial := self._around.trials.get(request.job)) is not None:
            return self._room_by_plan(job, trial, pools, barred, free, rival)
        if self._gives_way(job, pools, least - free, rival):
            return self._keep(request, self._free.first(pools, min(least, free), barred, ()))
        if rival is not None:
            return self._behind(rival)
        return self._wait(job, pools, barred, least, free)

    def _gives_way(self, job: QueuedJob, pools: Sequence[int], missing: int, rival: Shadow | None) -> bool:
        """Has others leave as many slots as are missing, if they may; returns whether they do."""
        request, displaces = job.request, self._may_displace(job)
        if rival is None or displaces:
            missing -= self._moves.promise(pools, missing)
            if missing <= 0:
                return True
        if self._displacing >= MOST_DISPLACING:
            return False
        self._displacing += 1
        shrink, claim = self._moves.shrink, self._ranking.claim(job)
        if shrink(missing, pools, below_want=False, claimant=request):
            return True
        if (rival is None or displaces) and shrink(missing, pools, below_want=True, claimant=request):
            return True
        if displaces and self._moves.park(missing, pools, claim, request, self._why_parked(request)):
            self._weakest = self._moves.weakest()
            return True
        return False

    def _why_parked(self, request: JobRequest) -> str:
        fair = self._rules.order is QueueOrder.FAIR
        return f", within the slots guaranteed to {request.account}" if fair else ""

    def _room_by_plan(
        self,
        job: QueuedJob,
        trial: SlotTrial,
        pools: Sequence[int],
        barred: frozenset[int],
        free: int,
        rival: Shadow | None,
    ) -> Hold:
        """As `_make_room`, for a job that counts say too little of."""
        request, displaces = job.request, self._may_displace(job)
        tried = free >= request.least_slots
        lacks = f"no plan with the free slots: {trial.why}" if tried else self._lacks(request, free)
        firm = rival is None or displaces
        room = RoomByPlan(request, trial, self._table, pools, barred, self._free)
        given = room.by_leavers(self._moves) if firm else None
        if given is None and not trial.searching and self._displacing < MOST_DISPLACING:
            self._displacing += 1
            claim = self._ranking.claim(job) if displaces else None
            why = self._why_parked(request)
            given = room.by_displacement(self._moves, below_want=firm, claim=claim, why=why)
            self._weakest = self._moves.weakest()
        if given is not None:
            return self._keep(request, room.free_of(given))
        if rival is not None:
            return self._behind(rival)
        active = [*self._running, *(state.job for state in self._starts)]
        may_give = partial(self._moves.may_give, tenant=request.account)
        later = slot_returns(active, self._table, may_give, self._now)
        head = room.shadow(later, self._now)
        if head is None:
            cause = Cause.PLAN if barred or trial.searching else Cause.NEVER
            return Hold(cause=cause, reason=f"no plan on this mesh, others go first: {trial.why or lacks}")
        return self._lead(head, Cause.PLAN, lacks)

    def _lacks(self, request: JobRequest, free: int, kept: frozenset[int] = frozenset()) -> str:
        """How many slots are missing. `kept`: those that reservations keep from it, and that would do."""
        lacks = f"needs {request.least_slots} {request.needs.places}, "
        lacks += self._table.free_of_all(request.needs, free)
        if not kept:
            return f"{lacks}: waiting for a job to end or a node to join"
        names = sorted(each.reservation.name for each in self._reserved if each.numbers & kept)
        return f"{lacks}, {len(kept)} kept by reservation {', '.join(names)}"

    def _keep(self, request: JobRequest, numbers: Sequence[int]) -> Hold:
        """Keeps these free slots for the job until those who make room have left."""
        self._shares.promise(request.account, request.least_slots)
        self._free.take(numbers)
        self._changed()
        text = "waits for the exit of those who make room for it"
        return Hold(cause=Cause.LEAVERS, reason=text, expected_at=self._moves.comes_at)

    def _wait(
        self, job: QueuedJob, pools: Sequence[int], barred: frozenset[int], least: int, free: int
    ) -> Hold:
        """The job is the first without room of those that may use its slots; later ones must not delay it."""
        request, rules = job.request, self._rules
        if rules.backfill is Backfill.EASY:
            may_give = partial(self._moves.may_give, tenant=request.account)
            later = returns(self._running, self._table, may_give, barred, self._now)
            for state in self._starts:
                ends_at = state.job.ends_at(self._now)
                later += [(ends_at, self._table.pool_of[self._table.index[slot]], 1) for slot in state.slots]
            head = shadow(request.job, least, pools, free, later, self._now)
            if barred and math.isinf(head.at):  # it may have to wait for the end of a reservation
                head.at = min(
                    each.reservation.end_at for each in self._reserved if not each.reservation.is_for(request)
                )
        else:
            head = Shadow(request.job, math.inf, frozenset(pools), 0)
        kept = barred if free + len(barred) >= least else frozenset()
        return self._lead(head, Cause.RESERVED if kept else Cause.ROOM, self._lacks(request, free, kept))

    def _lead(self, head: Shadow, cause: Cause, reason: str) -> Hold:
        """The job is the first of those without room that may use its slots."""
        if self._rules.backfill is not Backfill.EASY:
            head.at, head.numbers = math.inf, None
        head.everywhere = self._rules.backfill is Backfill.NONE
        self._heads.append(head)
        self._changed()
        expected_at = None if math.isinf(head.at) else head.at
        if not self._said.head:
            self._said.head, self._said.head_at = head.job, expected_at
        return Hold(cause=cause, reason=reason, expected_at=expected_at)

    def _behind(self, head: Shadow) -> Hold:
        hold = self._holds_behind.get(head.job)
        if hold is None:
            hold = Hold(cause=Cause.BEHIND, reason=f"behind {head.job}, which comes first", blocker=head.job)
            self._holds_behind[head.job] = hold
        return hold

    # --- the end --------------------------------------------------------------------------------------------
    def _look_again(self) -> None:
        """Asks for a decision when time alone changes something."""
        now, rules, said = self._now, self._rules, self._said
        if any(self._free.counts) and rules.resize:
            for job in self._running:
                if job.request.elastic and now < job.resized_at + rules.resize_pause_s:
                    said.again_at(job.resized_at + rules.resize_pause_s)
        if not said.holds or rules.order is QueueOrder.FCFS:
            return
        if rules.park:
            for job in self._running:
                rested_at = max(job.started_at, job.parked_at) + rules.cool_down_s
                if rested_at > now:
                    said.again_at(rested_at)
                falls_at = self._ranking.next_change(job.request, job.attained_slot_s, len(job.slots))
                if falls_at is not None:
                    said.again_at(falls_at)
        if rules.ageing_s:
            aged_s = max((now - waiting.since) % rules.ageing_s for waiting in self._queue)
            said.again_at(now + rules.ageing_s - aged_s)

    def _finish(self) -> QueueDecision:
        self._look_again()
        said = self._said
        said.resizes, said.parks = self._moves.resizes(), self._moves.parks()
        said.admissions = [state.admission for state in self._starts]
        return said
