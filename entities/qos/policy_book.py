"""Type 5 downward (draft §4.3, §4.4(4)): the communication policies that a router or gateway has."""

from __future__ import annotations

from schemas.signals import CommunicationPolicy


class PolicyBook:
    """The active communication policy of each job; a higher revision wins."""

    def __init__(self, remembered_ended: int = 1024) -> None:
        self.active: dict[str, CommunicationPolicy] = {}
        self._ended: dict[str, int] = {}
        self._remembered_ended = remembered_ended

    def take(self, policy: CommunicationPolicy) -> str:
        """Take a policy; return `adopted` or `ended` (also if repeated), or `held` or `older` if ignored."""
        if policy.ended:
            if self._ended.get(policy.job, -1) > policy.revision:
                return "older"
            self.active.pop(policy.job, None)
            self._ended[policy.job] = policy.revision
            while len(self._ended) > self._remembered_ended:
                del self._ended[next(iter(self._ended))]
            return "ended"
        active = self.active.get(policy.job)
        if policy.revision <= max(active.revision if active else -1, self._ended.get(policy.job, -1)):
            return "held" if active == policy else "older"
        self.active[policy.job] = policy
        return "adopted"
