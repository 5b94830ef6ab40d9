"""A candidate that fails its first requests goes back at once (pure; ADR-0134).

The rule stands in the orchestrator, so that it holds without any module. It counts the first 20 requests to
the candidate and all requests to the stable version meanwhile. From the fifth failure on it looks at each
request: if so many failures on the candidate's side are too unlikely by Fisher's exact test, the candidate
goes back. All looks together condemn a version that is no worse with a chance of at most 0.0004, whatever the
rate of failures is and however failures cluster in time, since an outage meets both versions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from typing_extensions import TypedDict


@dataclass(frozen=True, kw_only=True, slots=True)
class HardRuleConfig:
    """When a candidate goes back at once."""

    first: int = 20
    """Requests to the candidate that are looked at."""
    failures: int = 5
    """Fewest failures among them; fewer are left to `canary-judge`."""
    level: float = 0.0004
    """Chance that a version which is no worse goes back, over all looks."""

    def __post_init__(self) -> None:
        if not 0 < self.failures <= self.first or not 0 < self.level < 1:
            raise ValueError(f"{self.failures} failures of the first {self.first} at level {self.level}")

    @property
    def looks(self) -> int:
        return self.first - self.failures + 1


class HardRuleState(TypedDict):
    """What a new leader goes on from: how many requests and failures each side had."""

    candidate: int
    candidate_failed: int
    stable: int
    stable_failed: int
    looked_at: int


@dataclass(slots=True)
class HardRule:
    """Call `add` with each request of the two versions; it says why the candidate has to go back."""

    config: HardRuleConfig = HardRuleConfig()
    reason: str | None = None
    """Why the candidate goes back, once it does."""
    _candidate: int = 0
    _candidate_failed: int = 0
    _stable: int = 0
    _stable_failed: int = 0
    _looked_at: int = 0
    """Requests to the candidate so far, those before a change of weights included."""

    def add(self, *, candidate: bool, ok: bool) -> str | None:
        """Takes one request, and returns the reason once there is one."""
        if self.is_over:
            return self.reason
        if not candidate:
            self._stable, self._stable_failed = self._stable + 1, self._stable_failed + (not ok)
            return None
        # The request that makes the rule look does not count yet: that it is the candidate's is no chance.
        self._look()
        self._looked_at += 1
        self._candidate, self._candidate_failed = self._candidate + 1, self._candidate_failed + (not ok)
        return self.reason

    @property
    def is_over(self) -> bool:
        """Whether it has looked at all that it looks at, or knows already."""
        return self.reason is not None or self._looked_at > self.config.first

    def weights_changed(self) -> None:
        """Counts anew, since a request's chance to be the candidate's is another one now; looks are not given
        back.
        """
        self._candidate = self._candidate_failed = self._stable = self._stable_failed = 0

    def as_data(self) -> HardRuleState:
        return HardRuleState(
            candidate=self._candidate,
            candidate_failed=self._candidate_failed,
            stable=self._stable,
            stable_failed=self._stable_failed,
            looked_at=self._looked_at,
        )

    def restore(self, state: HardRuleState) -> None:
        self._candidate, self._candidate_failed = state["candidate"], state["candidate_failed"]
        self._stable, self._stable_failed = state["stable"], state["stable_failed"]
        self._looked_at = state["looked_at"]

    def _look(self) -> None:
        if self._candidate_failed < self.config.failures:
            return
        chance = chance_of_so_many(
            self._candidate_failed,
            self._candidate,
            self._candidate_failed + self._stable_failed,
            self._stable,
        )
        if chance <= self.config.level / self.config.looks:
            self.reason = (
                f"{self._candidate_failed} of its first {self._candidate} requests failed, "
                f"{self._stable_failed} of {self._stable} of the stable version in the same time "
                f"(chance {chance:.2g} if it were no worse)"
            )


def chance_of_so_many(failed: int, requests: int, all_failed: int, other_requests: int) -> float:
    """Fisher's exact test, one-sided: the chance that at least `failed` of `all_failed` failures fall among
    `requests` of all `requests + other_requests`, if who answers makes no difference."""
    total = requests + other_requests
    most = min(requests, all_failed)
    ways = sum(
        math.comb(all_failed, count) * math.comb(total - all_failed, requests - count)
        for count in range(failed, most + 1)
    )
    return ways / math.comb(total, requests)
