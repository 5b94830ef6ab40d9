"""What tenants hold, have used, own and borrow.

The share of a tenant is its dominant one (Ghodsi et al., Dominant Resource Fairness, NSDI 2011): the largest
of its shares of the slots of each kind. To it comes what it has used before, decayed by half-lives, as
in Slurm's fair share. A quota is what is always a tenant's own; beyond it, it borrows what others leave idle,
and gives that back when they come for it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from entities.queue.queued_job import ActiveJob, JobRequest
from entities.queue.slot_pools import SlotTable


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantQuota:
    """`slots`: the tenant's own; `most`: with borrowed ones; None: no limit. `weight` divides its share."""

    slots: int | None = None
    most: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.slots is not None and self.most is not None and self.most < self.slots:
            raise ValueError(
                f"quota: at most {self.most} slots, but {self.slots} are its own: give most ≥ slots"
            )
        if self.weight <= 0:
            raise ValueError(f"quota: weight {self.weight}: give a weight above 0")


NO_QUOTA = TenantQuota()


def decayed(slot_s: float, since_s: float, half_life_s: float) -> float:
    """What of a use in slot-seconds still counts `since_s` later."""
    return slot_s * math.exp2(-since_s / half_life_s)


class DecayedUse:
    """What each tenant has used, in slot-seconds of which half is forgotten after each half-life.

    Uses may be counted in any order, so that a new leader that reads all records comes to the same.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._used: dict[str, tuple[float, float]] = {}  # slot-seconds, as they count at a time

    def add(self, tenant: str, slot_s: float, lasted_s: float, until: float) -> None:
        """Counts slots that were held evenly for `lasted_s` until then."""
        lost = max(0.0, lasted_s) * math.log(2.0) / self._half_life_s
        counts = slot_s * -math.expm1(-lost) / lost if lost > 0 else slot_s
        used, at = self._used.get(tenant, (0.0, until))
        later = max(at, until)
        used = decayed(used, later - at, self._half_life_s)
        self._used[tenant] = used + decayed(counts, later - until, self._half_life_s), later

    def copy(self) -> DecayedUse:
        """One to which more can be added, for one decision."""
        other = DecayedUse(self._half_life_s)
        other._used = dict(self._used)
        return other

    def at(self, now: float) -> dict[str, float]:
        """What still counts of each tenant's use."""
        half_life_s = self._half_life_s
        return {
            tenant: decayed(used, max(0.0, now - at), half_life_s)
            for tenant, (used, at) in self._used.items()
        }


class TenantShares:
    """What each tenant holds during one decision; admissions and changes of size are told to it.

    Args:
        quotas: by tenant; of the others nothing is limited and nothing is their own.
        used_slot_s: decayed use of each tenant, in slot-seconds.
        horizon_s: the half-life of that use: a tenant that held all slots for so long has a past share of 1.
        counts: whether anybody will ask; else nothing is counted.
    """

    def __init__(
        self,
        table: SlotTable,
        active: Iterable[ActiveJob],
        quotas: Mapping[str, TenantQuota],
        used_slot_s: Mapping[str, float],
        horizon_s: float,
        counts: bool = True,
    ) -> None:
        self._quotas = quotas
        self._kinds: Counter[str] = table.kinds
        self._kind_of = {slot.slot: slot.kind for slot in table.slots} if len(self._kinds) > 1 else {}
        self._kind = next(iter(self._kinds), "")
        self._held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._slots: Counter[str] = Counter()
        total = max(1, table.computing) * horizon_s
        self._past = {tenant: used / total for tenant, used in used_slot_s.items()}
        self._counts = counts
        self.limited = bool(quotas)
        """Whether anybody has a quota."""
        self.changes = 0
        """Counts what was told: shares are what they were while it is the same."""
        self._share: dict[str, float] = {}
        self._promised: Counter[str] = Counter()
        if counts:
            for job in active:
                if not job.gives_up:  # what is given up already is not to be given up for others once more
                    self.add(job.request.account, [slot for slot in job.slots if slot not in job.leaving])

    def add(self, tenant: str, slots: Iterable[str], sign: int = 1) -> None:
        """The tenant gets these slots, or loses them (`sign` -1)."""
        if not self._counts:
            return
        names = tuple(slots)
        self.changes += 1
        self._share.pop(tenant, None)
        self._slots[tenant] += sign * len(names)
        held = self._held[tenant]
        if not self._kind_of:
            held[self._kind] += sign * len(names)
            return
        for name in names:
            held[self._kind_of.get(name, "")] += sign

    def promise(self, tenant: str, slots: int) -> None:
        """Others make room for a job of the tenant: that counts for what it may still ask others for."""
        self._promised[tenant] += slots

    def held(self, tenant: str) -> int:
        """The slots that it has, but for those that it is about to leave."""
        return self._slots[tenant]

    def share(self, tenant: str) -> float:
        """Its dominant share now and its past share, by its weight."""
        share = self._share.get(tenant)
        if share is None:
            kinds = self._kinds
            now = max((n / kinds[kind] for kind, n in self._held[tenant].items() if kinds[kind]), default=0.0)
            share = (now + self._past.get(tenant, 0.0)) / self.quota(tenant).weight
            self._share[tenant] = share
        return share

    def quota(self, tenant: str) -> TenantQuota:
        return self._quotas.get(tenant, NO_QUOTA)

    def borrowed(self, tenant: str) -> int:
        """The slots that it has beyond its own; those of a tenant without a quota are all borrowed."""
        if not self._quotas:
            return 0
        return max(0, self._slots[tenant] - (self.quota(tenant).slots or 0))

    def owns(self, tenant: str, slots: int) -> bool:
        """Whether so many slots more would be its own."""
        if not self.limited:
            return False
        own = self.quota(tenant).slots
        return own is not None and self._slots[tenant] + self._promised[tenant] + slots <= own

    def room(self, tenant: str) -> int | None:
        """How many slots more it may have, borrowed ones included; None: any number."""
        most = self.quota(tenant).most
        return None if most is None else max(0, most - self._slots[tenant])

    def excess(self, request: JobRequest) -> str:
        """Why the tenant may not have this job now; empty: it may."""
        room, needed = self.room(request.account), request.least_slots
        if room is None or needed <= room:
            return ""
        most = self.quota(request.account).most
        held = self.held(request.account)
        return f"{request.account} has {held} of at most {most} slots, this job needs {needed}"
