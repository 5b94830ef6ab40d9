"""Sums of parameters that several stages share: each stage's is sent to the others, and all are added. Pure.

A replica gets the sum of each other stage from one of its replicas, over the ordinary links. Exact sums are
int64, so that the total has the same bits everywhere, as if the layers were in one stage. `Preparation`
sends, waits and adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from schemas.step import Member

S = TypeVar("S")
Sends = list[tuple[Member, S]]
"""To whom which sum is to be sent now."""


class TiedSums(Generic[S]):
    """The exchange of one instance in the step that prepares. `S`: the sum of what two stages share."""

    def __init__(self) -> None:
        self._group: tuple[int, int, int] | None = None
        self._receivers: dict[Member, int] = {}  # to whom this instance sends in that group → their stage
        self._own: Mapping[int, S] = {}  # other stage → what it is sent
        self._came: dict[tuple[int, int, int], S] = {}

    def ordered(self, group: tuple[int, int, int], tied: Iterable[tuple[int, Iterable[Member]]]) -> Sends[S]:
        """Takes an order to prepare. It is repeated when the members of a tied stage change.

        Args:
            group: (step, attempt, generation) of this stage's reduction group.
            tied: The other stages, and to whom of them this instance sends.
        """
        if group != self._group:
            self._group, self._receivers, self._own = group, {}, {}
        news = {
            member: stage
            for stage, receivers in tied
            for member in receivers
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
