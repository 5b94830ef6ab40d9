"""What stages and steps of a job take now, as its claims say: medians of the last steps. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from schemas.step import Member, MicrobatchClaim

KEPT = 5
"""Steps of which the median is taken: fewer follow a slowdown sooner, more are steadier."""
MOST = 64
"""Steps remembered, for means over a while."""


@dataclass(slots=True)
class MeasuredStep:
    """One decided step, in milliseconds: itself, and what a microbatch took each member.

    `model_ms`: what the own loop's model says of it; None: nobody has computed that.
    """

    at: float
    step_ms: float
    microbatch_ms: Mapping[Member, float]
    model_ms: float | None = None


class MeasuredSpeeds:
    """The account of one job. Members that have computed nothing in the steps remembered are not in it."""

    def __init__(self) -> None:
        self._steps: deque[MeasuredStep] = deque(maxlen=MOST)

    def decided(self, claims: Iterable[MicrobatchClaim], step_s: float, at: float = 0.0) -> None:
        """Takes a decided step: who computed which microbatch how long, what the step took, and when."""
        found: dict[Member, list[float]] = defaultdict(list)
        for claim in claims:
            found[claim.owner].append(claim.forward_ms + claim.backward_ms)
        present = {member: median(times) for member, times in found.items()}
        self._steps.append(MeasuredStep(at, step_s * 1e3, present))

    def forget(self) -> None:
        """Other layers, or other members: what was measured says nothing any more."""
        self._steps.clear()

    @property
    def microbatch_ms(self) -> Mapping[Member, float]:
        """What a microbatch of its stage takes each member."""
        latest: dict[Member, list[float]] = {}
        for step in reversed(self._steps):
            for member, time_ms in step.microbatch_ms.items():
                times = latest.setdefault(member, [])
                if len(times) < KEPT:
                    times.append(time_ms)
        return {member: usual_ms for member, times in latest.items() if (usual_ms := median(times)) > 0}

    @property
    def step_ms(self) -> float | None:
        """What a step takes; None: none was measured."""
        latest = [step.step_ms for step in self._steps][-KEPT:]
        return median(latest) if latest else None

    def since(self, at: float, least: int) -> Sequence[MeasuredStep]:
        """The steps since a moment, and at least so many of the latest."""
        steps = list(self._steps)
        return [step for number, step in enumerate(steps, 1) if step.at >= at or number > len(steps) - least]
