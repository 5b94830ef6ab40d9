"""Who comes first among the waiting jobs, and who may have whom parked.

Jobs are ranked anew in every decision: by priority, by the slack that a deadline leaves, by age, by what
their tenants hold. So a job that is inserted, or whose deadline comes near, takes its place at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from entities.queue.queue_rules import QueueOrder, QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, predicted_s
from entities.queue.tenant_shares import TenantShares

Rank = tuple[int, int, int, int, tuple[int, float, str]]
"""Owner of a reservation that holds, class, urgent, begun, `JobRequest.turn`: lower comes first."""


class QueueRanking:
    """The order of one decision. `owners`: waiting jobs for which a reservation holds now."""

    def __init__(self, rules: QueueRules, shares: TenantShares, owners: Iterable[str], now: float) -> None:
        self._rules = rules
        self._is_fair = rules.order is QueueOrder.FAIR
        self._shares = shares
        self._owners = frozenset(owners)
        self._now = now

    def line(self, jobs: Sequence[QueuedJob]) -> Iterator[QueuedJob]:
        """The jobs in order. With fair shares the next job depends on what the last one was given."""
        ranked = [(self._rank(job), job) for job in jobs]
        ranked.sort(key=_first)
        if not self._is_fair:
            return iter([job for _, job in ranked])
        return self._in_shares(ranked)

    def _rank(self, job: QueuedJob) -> Rank:
        request = job.request
        reserved = 0 if self._owners and request.job in self._owners else 1
        urgent = 1 if request.deadline is None else int(not self._urgent(job, request.deadline))
        begun, level = 0 if job.parked else 1, 0
        if self._is_fair:
            level = -request.priority
        elif self._rules.order is QueueOrder.PRIORITY:
            level = -request.priority - self._aged(job)
        elif self._rules.order is QueueOrder.LAS:
            level = max(0, self._service_level(job.attained_slot_s) - self._aged(job))
            begun = 1
        return reserved, level, urgent, begun, request.turn

    def _in_shares(self, ranked: Sequence[tuple[Rank, QueuedJob]]) -> Iterator[QueuedJob]:
        shares, by_tenant = self._shares, defaultdict[str, list[QueuedJob]](list)
        for rank, job in reversed(ranked):
            if rank[0]:
                by_tenant[job.request.account].append(job)
        yield from (job for rank, job in ranked if not rank[0])
        # what a tenant is due changes only when a job of its own starts: entries of the heap stay true
        heap = [(self._need_of(tenant, jobs), tenant) for tenant, jobs in by_tenant.items()]
        heapq.heapify(heap)
        while heap:
            _, tenant = heapq.heappop(heap)
            jobs, changes = by_tenant[tenant], shares.changes
            while jobs:
                yield jobs.pop()
                if changes == shares.changes and not shares.limited:
                    continue  # nothing has started since
                changes = shares.changes
                if jobs and heap and (turn := (self._need_of(tenant, jobs), tenant)) > heap[0]:
                    heapq.heappush(heap, turn)
                    break

    def _need_of(self, tenant: str, jobs: Sequence[QueuedJob]) -> tuple[bool, float]:
        """Tenants whose next job would be within their own come first, then those with the least share."""
        return not self._shares.owns(tenant, jobs[-1].request.least_slots), self._shares.share(tenant)

    def _aged(self, job: QueuedJob) -> int:
        waited_s, every_s = self._now - job.since, self._rules.ageing_s
        return int(waited_s / every_s) if waited_s >= every_s > 0 else 0

    def _urgent(self, job: QueuedJob, deadline: float) -> bool:
        run_s = predicted_s(job, job.request.replicas.want)
        return deadline - self._now - run_s < self._rules.urgent_share * run_s

    def _service_level(self, attained_slot_s: float) -> int:
        return bisect_right(self._rules.service_levels_slot_s, attained_slot_s)

    # --- who may have whom parked -------------------------------------------------------------------------
    @property
    def displaces(self) -> bool:
        """Whether any claim may be stronger than a hold."""
        fair = self._rules.order is QueueOrder.FAIR
        return self._rules.order is not QueueOrder.FCFS and (not fair or self._shares.limited)

    def claim(self, job: QueuedJob) -> float:
        """How strong a waiting job's claim to slots is: it may displace those whose `hold` is higher."""
        order, request = self._rules.order, job.request
        if order is QueueOrder.PRIORITY:
            return -float(request.priority)  # not aged: a job that waited long comes first, but parks nobody
        if order is QueueOrder.FAIR:
            return 0.0 if self._shares.owns(request.account, request.least_slots) else 1.0
        if order is QueueOrder.LAS:
            return float(max(0, self._service_level(job.attained_slot_s) - self._aged(job)))
        return 0.0

    def standing(self, job: ActiveJob) -> float:
        """How weak a running job's hold on its slots is, on the scale of `claim`."""
        order, request = self._rules.order, job.request
        if order is QueueOrder.PRIORITY:
            return -float(request.priority)
        if order is QueueOrder.FAIR:
            return 1.0 if self._shares.borrowed(request.account) else 0.0
        if order is QueueOrder.LAS:
            return float(self._service_level(job.attained_slot_s))
        return 0.0

    def next_change(self, request: JobRequest, attained_slot_s: float, slots: int) -> float | None:
        """When a running job falls to the next level, if it does."""
        levels = self._rules.service_levels_slot_s
        level = self._service_level(attained_slot_s)
        if self._rules.order is not QueueOrder.LAS or level == len(levels) or not slots:
            return None
        return self._now + (levels[level] - attained_slot_s) / slots


def _first(ranked: tuple[Rank, QueuedJob]) -> Rank:
    return ranked[0]
