"""Jobs that have been told to park: when they do, and when they need not any more (ADR-0085)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from bus.logs import get_logger
from entities.orchestrator.queue.slot_holder import QueueMember
from entities.queue.decision import ParkOrder
from entities.queue.queued_job import ActiveJob
from schemas.queue import MOST_LISTED, ParkNotice

log = get_logger("orchestrator")


class ParkOrders:
    """The orders that jobs have been given, until they have parked or go on.

    Args:
        holders: the jobs and builds that have not ended, by id.
        claimants: the jobs and reservations for which somebody may park, at a time.
    """

    def __init__(
        self, holders: Mapping[str, QueueMember], claimants: Callable[[float], Collection[str]]
    ) -> None:
        self._holders = holders
        self._claimants = claimants
        self._orders: dict[str, ParkOrder] = {}
        self._parking: set[str] = set()  # those whose notice is over

    def __bool__(self) -> bool:
        """Whether anybody is to park."""
        return bool(self._orders)

    def give(self, orders: Iterable[ParkOrder], now: float) -> None:
        """Tells jobs that they are to park, or has them park if they need no notice.

        What has changed since the decision counts: a job that holds nothing any more hears nothing, and
        nobody parks for what does not wait any more.
        """
        claimants: Collection[str] | None = None
        for order in orders:
            holder = self._holders.get(order.job)
            if holder is None or holder.waiting is not None or order.job in self._orders:
                continue
            if claimants is None:
                claimants = self._claimants(now)
            if not order.held and order.blocker not in claimants:
                continue
            if order.at > now:
                self._orders[order.job] = order
                at = time.strftime("%H:%M:%S UTC", time.gmtime(order.at))
                holder.notify(f"parks at {at}, unless it ends before: {order.reason}")
                log.info("job is to park", job=order.job, at=order.at, reason=order.reason)
            elif holder.give_way(order.reason, held=order.held):
                self._orders[order.job] = order
                self._parking.add(order.job)

    def follow(self, now: float) -> None:
        """Parks jobs whose notice is over; what nobody needs any more is taken back.

        One that can't be parked just then, since it is brought back, say, parks as soon as it can. The order
        of a job that has parked, or ended, is forgotten.
        """
        if not self._orders:
            return
        claimants = self._claimants(now)
        for job, order in list(self._orders.items()):
            holder = self._holders.get(job)
            if holder is None or holder.waiting is not None or not holder.holds:
                self.forget(job)
            elif job in self._parking:
                continue
            elif not order.held and holder.held:  # a person parks it, and its record says why
                self.forget(job)
            elif not order.held and order.blocker not in claimants:
                self.forget(job)
                holder.notify(f"does not park: {order.blocker} needs its slots no more")
                log.info("park taken back", job=job, blocker=order.blocker)
            elif now >= order.at and holder.give_way(order.reason, held=order.held):
                self._parking.add(job)

    def forget(self, job: str) -> None:
        """The job has parked, or goes on."""
        self._orders.pop(job, None)
        self._parking.discard(job)

    def mark(self, holding: dict[str, ActiveJob]) -> None:
        """Notes with each of these jobs when it parks, in place."""
        for job, order in self._orders.items():
            if (active := holding.get(job)) is not None:
                over_time = order.held and job not in self._parking
                holding[job] = replace(active, parks_at=order.at, over_time=over_time)

    def times(self, now: float) -> Iterator[float]:
        """When notices end that have not ended yet."""
        return (
            order.at for order in self._orders.values() if order.job not in self._parking and order.at > now
        )

    def notices(self) -> tuple[ParkNotice, ...]:
        """The first of them, by their time."""
        first = sorted(self._orders.values(), key=lambda order: order.at)[:MOST_LISTED]
        return tuple(
            ParkNotice(job=order.job, at=order.at, reason=order.reason, blocker=order.blocker)
            for order in first
        )
