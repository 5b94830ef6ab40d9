"""The rules of a leader's lease, without I/O and without a clock.

The lease is a record that its holder writes again and again. Nothing expires it: whoever wants it
measures, by their own clock, how long it has stood unchanged *before their eyes*, and then claims the next
term by compare-and-set on the revision that they saw. So a server that is away, or a store that elects a
leader, makes nobody lose the lease: in that time nobody can look, claim or renew. Nor does a machine that
stands still for seconds: a time in which one did not look one has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from schemas.leadership import Leadership

RENEWALS = 4
"""Renewals per lease: three may be lost before anybody else may claim."""
SURE = 0.75
"""Share of the lease for which its holder trusts its last renewal; the rest is for unequal clocks."""
LATE = 2
"""The time since the last look counts for at most so many times `look_s`: whoever looks later than that stood
still, and the holder may have stood still beside them.
"""


@dataclass(frozen=True, kw_only=True)
class LeadershipLeaseConfig:
    """How leadership changes hands."""

    lease_s: float = 1.0  # shorter finds a dead leader sooner; must outlast a pause of the leader's process
    look_s: float = 0.2  # how often a follower looks; failover: lease_s + look_s if looks come in time
    attempt_s: float = 1.0  # one read or write; a store that elects a leader answers nobody meanwhile

    def __post_init__(self) -> None:
        if not 0 < LATE * self.look_s < self.lease_s:  # one late look alone is no lease's length
            raise ValueError(
                f"look_s {self.look_s} must be above 0 and below 1/{LATE} of lease_s {self.lease_s}"
            )

    @property
    def renew_s(self) -> float:
        return self.lease_s / RENEWALS


class Silence:
    """How long the lease has stood unchanged before our eyes."""

    def __init__(self, look_s: float) -> None:
        self._most = LATE * look_s
        self._revision: int | None = None
        self._looked = 0.0
        self._silent = 0.0

    def see(self, revision: int, now: float) -> float:
        """It was read: seconds for which it has been the same without a gap in our looking."""
        if revision != self._revision:
            self._revision, self._silent = revision, 0.0
        else:
            self._silent += min(now - self._looked, self._most)
        self._looked = now
        return self._silent

    def blink(self) -> None:
        """It could not be read: its holder may not have been able to write either. Begin anew."""
        self._revision = None


def claimable(held: Leadership, silence_s: float) -> bool:
    """Whether the next term may be claimed. The holder's own word counts for how long its lease is."""
    return held.released or silence_s >= held.lease_s


def next_claim(above: int, *, incarnation: str, lease_s: float, node: str, pid: int) -> Leadership:
    """The claim that follows the term `above`; 0: there was none."""
    return Leadership(
        incarnation=incarnation,
        term=above + 1,
        lease_s=lease_s,
        node=node,
        pid=pid,
    )


def is_same_leadership(one: Leadership, other: Leadership) -> bool:
    """Whether both are of one leader in one term."""
    return (one.incarnation, one.term) == (other.incarnation, other.term)


def sure_until(written_at: float, lease_s: float) -> float:
    """Until when a holder that began its last successful renewal at `written_at` may act unasked."""
    return written_at + SURE * lease_s
