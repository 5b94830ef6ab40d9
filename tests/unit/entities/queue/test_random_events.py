"""10,000 random events in virtual time, a quarter of them in each order of the queue.

No partial gang, no slot twice, no slot of a reservation given to others, lent slots come back, no deadlock:
every job whose minimum fits starts and ends. `make test-queue-events` has 10,000 in each order, with four
seeds (`DMSC_QUEUE_EVENTS`, `DMSC_QUEUE_SEEDS`).
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from entities.queue.decision import QueueDecision
from entities.queue.queue_rules import Backfill, QueueOrder, QueueRules
from entities.queue.queued_job import JobRequest, Replicas
from entities.queue.reservations import SlotReservation, assign, barred_for, counting, too_many
from entities.queue.scheduling import QueueSurroundings
from entities.queue.slot_pools import MeshSlot, SlotNeeds, SlotTable
from entities.queue.tenant_shares import TenantQuota
from entities.queue.virtual_queue import TraceJob, VirtualQueue

SEEDS = [int(seed) for seed in os.environ.get("DMSC_QUEUE_SEEDS", "1").split(",")]
NODES, SLOTS_OF_A_NODE = 6, 4
EVENTS = int(os.environ.get("DMSC_QUEUE_EVENTS", "2500"))
"""In each order."""
JOBS = EVENTS * 27 // 100
OWN = {"x": 8, "y": 8}
"""Slots that are a tenant's own; z borrows all that it has."""
BACK_S = 900.0
"""Within this time lent slots come back: a cool-down of 300, a notice of 60, a park, what is in between."""


def random_job(number: int, at: float, draw: random.Random) -> TraceJob:
    least = draw.choice((1, 1, 1, 2, 3))
    want = least + draw.choice((0, 0, 1, 3))
    request = JobRequest(
        job=f"job-{number:05}",
        submitted_at=at,
        tenant=draw.choice("xyz"),
        priority=draw.randrange(4),
        replicas=Replicas(least=least, want=want, most=want + draw.choice((0, 0, 6))),
        replica_slots=draw.choice((1, 1, 2)),
        other_slots=draw.choice((0, 0, 0, 1)),
        needs=SlotNeeds(kind="cuda") if draw.random() < 0.2 else SlotNeeds(),
        deadline=at + 4000 if draw.random() < 0.1 else None,
        after=(f"job-{draw.randrange(number):05}",) if number and draw.random() < 0.1 else (),
        array=(array := draw.choice(("", "", "", "sweep"))),
        array_limit=2 if array else 0,
        wall_time_s=draw.uniform(100, 2000) if draw.random() < 0.05 else None,
        notice_s=draw.choice((0.0, 0.0, 0.0, 60.0)),
    )
    return TraceJob(request=request, work_s=draw.lognormvariate(5, 1.2), estimate=draw.uniform(0.5, 3))


class RandomMesh:
    """A queue in virtual time, what people and machines do to it, and what has to hold after each event."""

    def __init__(self, order: QueueOrder, seed: int) -> None:
        self.said = (seed, str(order))
        self.draw = draw = random.Random(f"{seed} {order}")
        self.rules = QueueRules(
            order=order,
            ageing_s=3600,
            cool_down_s=draw.choice((60, 300)),
            notice_s=draw.choice((0, 20)),
            service_levels_slot_s=(200, 1000, 5000),
            backfill=draw.choice((Backfill.EASY, Backfill.EASY, Backfill.NONE)),
        )
        self.away: set[str] = set()
        self.held: set[str] = set()
        self.reservations: list[SlotReservation] = []
        owns = order in (QueueOrder.FAIR, QueueOrder.PRIORITY)
        most = {"y": 20} if owns else {}
        self.quotas = {t: TenantQuota(slots=own, most=most.get(t)) for t, own in OWN.items()} if owns else {}
        self.ahead = VirtualQueue(around=self.around(0.0), watch=self.decided)
        self.last_park: dict[str, float] = {}
        self.entitled_since: dict[str, float] = {}
        self.happened = Counter[str]()
        self.claims = 0
        jobs, at = [], 0.0
        for number in range(JOBS):
            at += draw.expovariate(1 / 70)
            jobs.append(random_job(number, at, draw))
        self.ahead.submit(jobs)

    def around(self, now: float) -> QueueSurroundings:
        slots = [
            MeshSlot(slot=f"s{number}", node=f"n{number // SLOTS_OF_A_NODE}", kind=kind)
            for number, kind in enumerate(["cuda"] * 10 + ["cpu"] * (NODES * SLOTS_OF_A_NODE - 10))
        ]
        self.reservations = list(counting(self.reservations, now))
        return QueueSurroundings(
            table=SlotTable(slot for slot in slots if slot.node not in self.away),
            rules=self.rules,
            reservations=tuple(self.reservations),
            quotas=self.quotas,
        )

    # --- what happens -------------------------------------------------------------------------------------
    def something_happens(self) -> None:
        """One of all that people and machines do, or nothing."""
        acts: list[tuple[float, Callable[[], bool]]] = [
            (0.02, self.somebody_holds),
            (0.03, self.somebody_lets_go),
            (0.02, self.somebody_parks),
            (0.03, self.somebody_prioritises),
            (0.006, self.a_node_leaves),
            (0.02, self.a_node_joins),
            (0.01, self.somebody_reserves),
            (0.01, self.somebody_cancels_a_reservation),
        ]
        for share, act in acts:
            if self.draw.random() < share and act():
                self.happened[act.__name__] += 1

    def somebody_holds(self) -> bool:
        if free := [job for job in self.ahead.waiting if job not in self.held]:
            self.held.add(job := self.draw.choice(free))
            self.ahead.hold(job, True)
        return bool(free)

    def somebody_lets_go(self) -> bool:
        if held := sorted(job for job in self.ahead.waiting if job in self.held):
            self.held.discard(job := self.draw.choice(held))
            self.ahead.hold(job, False)
        return bool(held)

    def somebody_parks(self) -> bool:
        if running := sorted(self.ahead.holders):
            self.ahead.park(job := self.draw.choice(running))
            self.held.add(job)
        return bool(running)

    def somebody_prioritises(self) -> bool:
        if jobs := sorted([*self.ahead.waiting, *self.ahead.holders]):
            self.ahead.change_request(self.draw.choice(jobs), priority=self.draw.randrange(4))
        return bool(jobs)

    def a_node_leaves(self) -> bool:
        if leaves := len(self.away) < 2:
            self.away.add(self.draw.choice([f"n{n}" for n in range(NODES) if f"n{n}" not in self.away]))
            self.ahead.change_mesh(self.around(self.ahead.now))
        return leaves

    def a_node_joins(self) -> bool:
        if joins := bool(self.away):
            self.away.discard(self.draw.choice(sorted(self.away)))
            self.ahead.change_mesh(self.around(self.ahead.now))
        return joins

    def somebody_reserves(self) -> bool:
        start = self.ahead.now + self.draw.uniform(0, 2000)
        whose = self.draw.choice(("tenant", "job", "nobody"))
        waiting = self.ahead.waiting
        new = SlotReservation(
            name=f"r{self.happened.total()}",
            start_at=start,
            end_at=start + self.draw.uniform(200, 1500),
            count=self.draw.randrange(1, 7),
            tenant=self.draw.choice("xyz") if whose == "tenant" else "",
            job=self.draw.choice(sorted(waiting)) if whose == "job" and waiting else "",
        )
        here = self.around(self.ahead.now)
        present = [each for each in self.reservations if each.end_at > self.ahead.now]
        if fits := len(present) < 3 and not too_many(new, self.reservations, here.table):
            self.reservations.append(new)
            self.ahead.change_mesh(self.around(self.ahead.now))
        return fits

    def somebody_cancels_a_reservation(self) -> bool:
        now = self.ahead.now
        if there := [each for each in self.reservations if each.end_at > now]:
            self.reservations.remove(gone := self.draw.choice(there))
            if gone.start_at < now:
                self.reservations.append(replace(gone, end_at=now))
            self.ahead.change_mesh(self.around(now))
        return bool(there)

    def everything_comes_to_rest(self) -> None:
        """Nodes are back, nothing is reserved, nobody is held."""
        self.away.clear()
        self.reservations.clear()
        self.ahead.change_mesh(self.around(self.ahead.now))
        self.everybody_is_let_go()

    def everybody_is_let_go(self) -> None:
        for job in self.ahead.waiting:
            self.ahead.hold(job, False)
        self.held.clear()

    # --- what has to hold ---------------------------------------------------------------------------------
    def decided(self, now: float, decision: QueueDecision) -> None:
        """After each decision: nobody parks too often, and nobody starts in slots kept for others."""
        for park in decision.parks:
            if "reservation" not in park.reason and not park.held:
                assert now - self.last_park.get(park.job, -math.inf) >= self.rules.cool_down_s, (
                    self.said,
                    park,
                )
            self.last_park[park.job] = now
        table = self.ahead.around.table
        reserved = [each for each in assign(self.reservations, table) if each.reservation.end_at > now]
        running = {job.request.job: job for job in self.ahead.snapshot()[1]}
        for start in decision.admissions:
            job = running[start.job]
            barred = barred_for(job.request, reserved, now, job.ends_at(now))
            kept = {table.slots[number].slot for number in barred}
            assert kept.isdisjoint(start.slots), (self.said, start, "in slots that are kept for others")
        for resize in decision.resizes:
            job = running[resize.job]
            barred = barred_for(job.request, reserved, now, now + 1e-9)
            kept = {table.slots[number].slot for number in barred}
            assert kept.isdisjoint(resize.takes), (self.said, resize, "grows into slots that are kept")

    def check(self) -> None:
        """After each event."""
        ahead, table = self.ahead, self.ahead.around.table
        holders = ahead.holders
        held = [slot for slots in holders.values() for slot in slots]
        assert len(held) == len(set(held)), (self.said, "a slot twice")
        _, running = ahead.snapshot()
        for job in running:
            name, request = job.request.job, job.request
            assert request.replicas.least <= job.replicas <= request.replicas.most, (self.said, name)
            gang = len(job.slots) - len(job.leaving)
            assert gang == request.slots(job.replicas), (self.said, name, "a partial gang, or more than that")
            assert all(request.needs.admit(table.slots[table.index[slot]]) for slot in job.slots), (
                self.said,
                name,
            )
        if self.rules.order is QueueOrder.FAIR:
            self.check_shares()

    def check_shares(self) -> None:
        """A job that its tenant's own slots suffice for does not wait while others have borrowed these."""
        ahead, now = self.ahead, self.ahead.now
        if self.away or any(each.end_at > now for each in self.reservations):
            self.entitled_since.clear()
            return
        queue, running = ahead.snapshot()
        has = Counter[str]()
        for job in running:
            has[job.request.tenant] += len(job.slots)
        arrays = Counter(job.request.array for job in running)
        entitled = set()
        for tenant, own in OWN.items():
            mine = [
                job for job in queue if job.request.tenant == tenant and self.could_start(job.request, arrays)
            ]
            # two tenants may have all slots of a kind, and neither more than its own: nobody has borrowed
            lent = any(slots > OWN.get(other, 0) for other, slots in has.items() if other != tenant)
            if lent and mine and has[tenant] + max(job.request.least_slots for job in mine) <= own:
                entitled.add(tenant)
        self.claims += len(entitled - self.entitled_since.keys())
        for tenant in entitled:
            since = self.entitled_since.setdefault(tenant, now)
            assert now - since <= BACK_S, (self.said, tenant, "waits for slots that are its own", now - since)
        for tenant in self.entitled_since.keys() - entitled:
            del self.entitled_since[tenant]

    def could_start(self, request: JobRequest, arrays: Counter[str]) -> bool:
        return (
            request.job not in self.held
            and not request.held
            and not request.needs.kind
            and all(self.ahead.courses[other].ended_at is not None for other in request.after)
            and not (request.array_limit and arrays[request.array] >= request.array_limit)
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", QueueOrder)
def test_ten_thousand_random_events(order: QueueOrder, seed: int) -> None:
    print(f"seed {seed}")
    mesh = RandomMesh(order, seed)
    ahead, events = mesh.ahead, 0
    while ahead.pending and events < EVENTS:
        ahead.step()
        events += 1
        mesh.check()
        mesh.something_happens()
    assert events == EVENTS
    assert len(mesh.happened) == 8, (mesh.said, mesh.happened, "something never happened")
    mesh.everything_comes_to_rest()
    while ahead.pending:
        ahead.step()
        mesh.check()
        if not ahead.holders:  # only who is held waits: a wall time is over
            mesh.everybody_is_let_go()
    unfinished = [name for name, course in ahead.courses.items() if course.ended_at is None]
    assert unfinished == [], (mesh.said, unfinished)
    print(f"{events} events, {ahead.decisions} decisions: {dict(mesh.happened)}")
    assert mesh.claims or order is not QueueOrder.FAIR, (mesh.said, "nobody ever waited for lent slots")
