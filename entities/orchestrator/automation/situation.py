"""What the loop sees of one running job, and what a step of it takes. Pure; times in milliseconds.

A step takes as long as the stage that takes longest for all its microbatches, the fill (a microbatch through
the others), and a rest, which is what measured steps take beyond these. A microbatch is never divided: M of
them on instances that take `t` each are done after the least time in which Σ⌊time ÷ t⌋ ≥ M.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from schemas.recut import Cuts


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceFigures:
    """One working instance. `slot`: the name of its place; `speed`: of that slot, as registered.

    `error_ms`: the standard error of `microbatch_ms`, a mean of steps; `least_ms`: the least of the latest.
    """

    sid: str
    slot: str
    microbatch_ms: float
    speed: float = 1.0
    error_ms: float = 0.0
    least_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSlot:
    """A slot that nobody has. `slot`: its name; `index`: on its node, `node`, which is the agent's SID.

    `speed`: as registered, and as its agent judges it.
    """

    slot: str
    node: str
    index: int = 0
    speed: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFigures:
    """One stage. `work_ms`: of a microbatch at speed 1, by the plan; `joins_ms`: until a newcomer works.

    `window`: microbatches that one sender may have open at one receiver; 0: not known. `link_ms`: of a usual
    transfer over the slowest link into the stage, as Type 5 reports it.
    """

    instances: tuple[InstanceFigures, ...]
    work_ms: float = 0.0
    joins_ms: float = 2000.0
    weights: Mapping[str, float] = field(default_factory=dict)
    window: int = 0
    link_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BestCut:
    """The cut that fits present speeds best, and what a step takes with the present one and with it."""

    cuts: Cuts
    now_ms: float
    then_ms: float
    copies_ms: float
    """How long state goes over links while training goes on, a tenth slower."""
    clear: bool = False
    """Whether all of the latest steps say the same of each instance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSituation:
    """One running job at one moment.

    `scale`, `rest_ms`: what turns the model into measured steps (`correction`). `busy`: why nothing can be
    changed now; empty: it can. `plan`: revision of its cut. `measured_steps`: those by which the figures go.
    """

    job: str
    step: int
    steps_left: int
    microbatches: int
    step_ms: float
    stages: tuple[StageFigures, ...]
    scale: float = 1.0
    rest_ms: float = 0.0
    free: tuple[FreeSlot, ...] = ()
    plan: int = 0
    measured_steps: int = 0
    algorithm: str = ""
    moves: bool = True
    """Whether instances may change their stage (`parallel.rebalance`)."""
    best_cut: BestCut | None = None
    busy: str = ""
    uneven: bool = False
    """Whether the longest stage takes a tenth longer than if work could be divided at will."""

    @property
    def times(self) -> tuple[tuple[float, ...], ...]:
        """What a microbatch takes each instance, by stage."""
        return tuple(tuple(one.microbatch_ms for one in stage.instances) for stage in self.stages)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of what was measured, and its standard error."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return mean, 0.0
    spread = sum((value - mean) ** 2 for value in values)  # `statistics.stdev` is exact, and slow
    return mean, math.sqrt(spread / (count - 1) / count)


def busy_ms(times: Sequence[float], microbatches: int) -> float:
    """The least time in which instances do so many microbatches that each take `times`."""
    rate = sum(1.0 / time for time in times)
    if not rate:
        return math.inf
    done_at = microbatches / rate  # if microbatches could be divided
    counts = [math.floor(done_at / time * (1 + 1e-9)) for time in times]
    last = max((count * time for count, time in zip(counts, times, strict=True)), default=0.0)
    following = [((count + 1) * time, time) for count, time in zip(counts, times, strict=True)]
    heapq.heapify(following)
    for _ in range(microbatches - sum(counts)):
        last, time = following[0]
        heapq.heapreplace(following, (last + time, time))
    return last


def model_ms(stages: Sequence[Sequence[float]], microbatches: int) -> float:
    """A step by its stages alone: the longest, and the fill through the others."""
    if not all(stages):
        return math.inf
    busy = [busy_ms(times, microbatches) for times in stages]
    longest = busy.index(max(busy))
    return busy[longest] + sum(min(times) for stage, times in enumerate(stages) if stage != longest)


def correction(steps: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(`scale`, `rest_ms`) by steps as they were: (measured ms, ms by the model) of each."""
    rest_ms = median(measured - modelled for measured, modelled in steps)
    if rest_ms >= 0:
        return 1.0, rest_ms
    return median(measured / modelled for measured, modelled in steps), 0.0


def forecast_ms(situation: JobSituation, stages: Sequence[Sequence[float]]) -> float:
    """A step once instances take these times: by the model, corrected by what steps took beside it."""
    return situation.scale * model_ms(stages, situation.microbatches) + situation.rest_ms
