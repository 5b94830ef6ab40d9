"""The rules of a leader's lease, without I/O and without a clock.

The lease is a record that its holder rewrites periodically. No server expires it. Each candidate measures, by
its own clock, how long it has *observed* the record unchanged, and then claims the next term by
compare-and-set on the revision that it saw. So nobody loses the lead while the server is away or the store
elects its own leader: in that time nobody can read, claim or renew. Nor does a machine that stands still for
seconds cost anybody the lead: time in which a candidate did not read it counts at most as a late check.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.leadership import Leadership

RENEWALS = 4
"""Renewals per lease: three may be lost before another candidate may claim."""
CERTAIN = 0.75
"""Share of the lease for which its holder trusts its last renewal; the rest allows for unequal clocks."""
LATE = 2
"""The time since the last check counts as at most this many times `check_s`: a candidate that checks later
than that stood still, and the holder on the same machine may have stood still too.
"""


@dataclass(frozen=True, kw_only=True)
class LeadershipLeaseConfig:
    """Timing of the leader's lease."""

    lease_s: float = 1.0  # shorter finds a dead leader sooner; must outlast a pause of the leader's process
    check_s: float = 0.2  # how often a candidate reads it; failover: lease_s + check_s if checks are on time
    attempt_s: float = 1.0  # limit per read or write; a store that elects its leader does not answer
    release_s: float = 1.0  # limit for giving up the lead; after it the lease expires by silence

    def __post_init__(self) -> None:
        if not 0 < LATE * self.check_s < self.lease_s:  # one late check must not count as a whole lease
            raise ValueError(
                f"check_s {self.check_s} must be above 0 and below 1/{LATE} of lease_s {self.lease_s}"
            )

    @property
    def renew_s(self) -> float:
        return self.lease_s / RENEWALS


class Silence:
    """How long a candidate has observed the lease unchanged."""

    def __init__(self, check_s: float) -> None:
        self._longest_gap = LATE * check_s
        self._revision: int | None = None
        self._last_check = 0.0
        self._silence_s = 0.0

    def observe(self, revision: int, now: float) -> float:
        """Note a read; return the seconds for which the revision was observed unchanged without a gap."""
        if revision != self._revision:
            self._revision, self._silence_s = revision, 0.0
        else:
            self._silence_s += min(now - self._last_check, self._longest_gap)
        self._last_check = now
        return self._silence_s

    def interrupt(self) -> None:
        """Note a failed read and start anew: the holder may not have been able to write either."""
        self._revision = None


def claimable(record: Leadership, silence_s: float) -> bool:
    """Whether the next term may be claimed. The length of the lease is what its holder wrote into it."""
    return record.released or silence_s >= record.lease_s


def next_claim(above: int, *, incarnation: str, lease_s: float, node: str, pid: int) -> Leadership:
    """The claim of the term that follows `above`; 0 means that there was no term."""
    return Leadership(
        incarnation=incarnation,
        term=above + 1,
        lease_s=lease_s,
        node=node,
        pid=pid,
    )


def is_same_leadership(record: Leadership, other: Leadership) -> bool:
    """Whether both records are of the same leader in the same term."""
    return (record.incarnation, record.term) == (other.incarnation, other.term)


def certain_until(written_at: float, lease_s: float) -> float:
    """Time until which a holder may act without a new renewal, if its last one began at `written_at`."""
    return written_at + CERTAIN * lease_s
