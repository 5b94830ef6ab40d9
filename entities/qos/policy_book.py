"""Type 5 downward, as routers and gateways hold it (draft §4.3, §4.4(4)): one policy per job."""

from __future__ import annotations

from schemas.signals import CommunicationPolicy


class PolicyBook:
    """The communication policies that a router or gateway holds, one per job; a higher revision wins."""

    def __init__(self, remembered_ended: int = 1024) -> None:
        self.active: dict[str, CommunicationPolicy] = {}
        self._ended: dict[str, int] = {}
        self._remembered_ended = remembered_ended

    def take(self, policy: CommunicationPolicy) -> str:
        """`adopted`, `ended` (again, where repeated), or why nothing changed: `held`, `older`."""
        if policy.ended:
            if self._ended.get(policy.job, -1) > policy.revision:
                return "older"
            self.active.pop(policy.job, None)
            self._ended[policy.job] = policy.revision
            while len(self._ended) > self._remembered_ended:
                del self._ended[next(iter(self._ended))]
            return "ended"
        held = self.active.get(policy.job)
        if policy.revision <= max(held.revision if held else -1, self._ended.get(policy.job, -1)):
            return "held" if held == policy else "older"
        self.active[policy.job] = policy
        return "adopted"
