"""Sums of parameters that several stages share: each stage's is sent to the others, and all are added. Pure.

A replica gets the sum of each other stage from one of its replicas, over the ordinary links. Exact sums are
int64, so that the total has the same bits everywhere, as if the layers were in one stage. `Preparation`
sends, waits and adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from schemas.step import Member

S = TypeVar("S")
Sends = list[tuple[Member, S]]
"""To whom which sum is to be sent now."""


class TiedSums(Generic[S]):
    """The exchange of one instance in the step that prepares. `S`: the sum of what two stages share."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._group: tuple[int, int, int] | None = None
        self._receivers: dict[Member, int] = {}  # to whom this instance sends in that group → their stage
        self._own: Mapping[int, S] = {}  # other stage → what it is sent
        self._came: dict[tuple[int, int, int], S] = {}

    def ordered(
        self,
        group: tuple[int, int, int],
        members: Sequence[Member],
        tied: Iterable[tuple[int, Sequence[Member]]],
    ) -> Sends[S]:
        """Takes an order to prepare. It is repeated when the members of a tied stage change.

        Args:
            group: (step, attempt, generation) of this stage's reduction group.
            members: Those of the group; the i-th of n sends to each n-th member of another stage.
            tied: The other stages and their members.
        """
        if group != self._group:
            self._group, self._receivers, self._own = group, {}, {}
        first, every = members.index(self._member), len(members)
        news = {
            member: stage
            for stage, others in tied
            for member in others[first::every]
            if member not in self._receivers
        }
        self._receivers |= news
        return self._sends(news)

    def reduced(self, own: Mapping[int, S]) -> Sends[S]:
        """This stage's sum over its replicas: what it shares with each other stage."""
        self._own = own
        return self._sends(self._receivers)

    def _sends(self, receivers: Mapping[Member, int]) -> Sends[S]:
        return [(member, self._own[stage]) for member, stage in receivers.items() if stage in self._own]

    def arrived(self, step: int, attempt: int, stage: int, sums: S) -> None:
        """Takes the sum of another stage. It stays when this stage's group ends: it may not be sent again."""
        self._came[step, attempt, stage] = sums

    def of(self, step: int, attempt: int, stages: Iterable[int]) -> dict[int, S] | None:
        """The sums of these stages, in their order; None: not all have come."""
        keys = [(step, attempt, stage) for stage in sorted(stages)]
        return {key[2]: self._came[key] for key in keys} if self._came.keys() >= set(keys) else None

    def clear(self) -> None:
        """The step or its attempt is over: members of tied stages have what they need, or begin again."""
        self._group, self._receivers, self._own, self._came = None, {}, {}, {}
