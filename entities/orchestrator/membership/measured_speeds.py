"""What stages and steps of a job take now, as its claims say: medians of the last steps. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import median

from schemas.step import Member, MicrobatchClaim

KEPT = 5
"""Steps of which the median is taken: fewer follow a slowdown sooner, more are steadier."""


class MeasuredSpeeds:
    """The account of one job. Members that have computed nothing yet are not in it."""

    def __init__(self) -> None:
        self._times: dict[Member, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._steps: deque[float] = deque(maxlen=KEPT)

    def decided(self, claims: Iterable[MicrobatchClaim], step_s: float) -> None:
        """Takes a decided step: who computed which microbatch how long, and what the step took."""
        found: dict[Member, list[float]] = defaultdict(list)
        for claim in claims:
            found[claim.owner].append(claim.forward_ms + claim.backward_ms)
        for member, times in found.items():
            self._times[member].append(median(times))
        self._steps.append(step_s * 1e3)

    def forget(self) -> None:
        """Other layers, or other members: what was measured says nothing any more."""
        self._times.clear()
        self._steps.clear()

    @property
    def microbatch_ms(self) -> Mapping[Member, float]:
        """What a microbatch of its stage takes each member."""
        return {member: median(times) for member, times in self._times.items() if median(times) > 0}

    @property
    def step_ms(self) -> float | None:
        """What a step takes; None: none was measured."""
        return median(self._steps) if self._steps else None
