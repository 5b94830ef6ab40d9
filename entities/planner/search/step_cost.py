"""What a step of a pipeline takes, and the best cut for given instances (ADR-0070).

A step's time is that of the costliest stage for all its microbatches, the fill (a microbatch through the
other stages), the largest reduction of sums, and a constant. The instances of a stage share its
microbatches by load, so their speeds add up, but a microbatch is never divided: M of them over instances of
speeds v take the least t with Σ⌊t·v⌋ ≥ M, a scalar for each group of instances (`rounds`). So the cut stays
an exact dynamic programme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from entities.planner.layer_rules import reaches
from entities.planner.search.chain_cut import Cuts, interval_sums, least_bottleneck, least_sum
from entities.planner.search.layer_chain import Floats, LayerChain
from entities.planner.windows import held, in_flight_before

NO_FIT = 1e12
"""The step, ms, of what does not fit into memory, times by how much: a search still sees the way down."""
UNBOUNDED = float(np.finfo(np.float64).max)
"""Less than infinite: what may not be stays out."""
SLACK = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3)
"""Within the least that a stage takes beyond its fill, and such a part of it more, the shortest fill is
looked for."""


@dataclass(frozen=True, order=True)
class InstanceKind:
    """Instances that are alike to a plan. `memory_bytes` 0: not known, fits all."""

    speed: float
    """Relative: work at speed 1 takes what was measured."""
    memory_bytes: int = 0
    labels: tuple[str, ...] = ()
    """Ascending, `key=value`."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What a step depends on beside the chain and its instances."""

    microbatches: int
    link_bytes_per_s: float = 1e9
    hop_ms: float = 1.0
    """What a microbatch loses between two stages, in each direction."""
    constant_ms: float = 0.0
    """Of a step, whatever the plan: orders, votes, the decision, the optimizer."""
    instance_ms: float = 0.0
    """Likewise, for each instance that works."""
    most_held: int = 0
    """As of `PlanRequest`."""
    memory_factor: float = 1.0
    """What allocators take beyond what is asked for."""


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """One stage of a plan. Milliseconds of a whole step; bytes of one instance."""

    first: int
    last: int
    instances: tuple[tuple[InstanceKind, int], ...]
    compute_ms: float
    link_ms: float
    reduction_ms: float
    memory_bytes: int

    @property
    def total_ms(self) -> float:
        return max(self.compute_ms, self.link_ms)


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """What a step will take, ms, and of what it consists."""

    step_ms: float
    bottleneck_ms: float
    fill_ms: float
    reduction_ms: float
    constant_ms: float
    stages: tuple[StageForecast, ...]

    @property
    def bubble(self) -> float:
        """The part of a step in which the costliest stage has nothing to compute."""
        return 1.0 - self.bottleneck_ms / self.step_ms

    def reason(self) -> str:
        """In words, for people."""
        at = min(
            range(len(self.stages)), key=lambda stage: abs(self.stages[stage].total_ms - self.bottleneck_ms)
        )
        by = "on its links" if self.stages[at].link_ms > self.stages[at].compute_ms else "computing"
        return (
            f"a step takes {self.step_ms:.0f} ms: stage {at} is {self.bottleneck_ms:.0f} ms {by} and waits "
            f"{max(0.0, self.fill_ms):.0f} ms for others, gradients are summed in {self.reduction_ms:.0f} "
            f"ms, orders and votes take {self.constant_ms:.0f} ms"
        )


Group = tuple[int, ...]
"""How many instances of each kind one stage has."""
Window = tuple[slice, slice]
"""The edges at which a stage may begin, and at which it may end."""


@lru_cache(maxsize=65536)
def rounds(speeds: tuple[tuple[float, int], ...], microbatches: int) -> float:
    """The least t for which instances of these speeds do so many undivided pieces of work 1: Σ⌊t·speed⌋ ≥
    them.

    Args:
        speeds: (speed, how many instances have it).
        microbatches: of a step.
    """
    total = sum(speed * count for speed, count in speeds)
    low = microbatches / total
    high = (microbatches + sum(count for _, count in speeds)) / total
    ends = np.unique(
        np.concatenate(
            [
                np.arange(np.ceil(low * speed - 1e-9), np.floor(high * speed) + 2) / speed
                for speed, _ in speeds
            ]
        )
    )
    ends = ends[ends > 0]
    done = sum(count * np.floor(ends * speed + 1e-9) for speed, count in speeds)
    return float(ends[int(np.argmax(done >= microbatches))])


class StepCost:
    """The cost of a chain on groups of instances. Matrices of stages are kept: a search asks again and again.

    Args:
        chain: the layers; only its `edges` are cut.
        kinds: of instances; groups count them in this order.
        settings: of the step.
        pins: of each layer, labels that its instances must have; empty: none.
        parted: as of `PlanRequest`.
    """

    def __init__(
        self,
        chain: LayerChain,
        kinds: Sequence[InstanceKind],
        settings: StepSettings,
        pins: Sequence[Sequence[str]] = (),
        parted: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        self.chain, self.kinds, self.settings = chain, tuple(kinds), settings
        self._edges = np.array(chain.edges)
        pieces = self._edges[:-1]
        self._work = interval_sums(np.add.reduceat(chain.work_ms, pieces))
        self._state = interval_sums(np.add.reduceat(chain.state_bytes, pieces))
        self._kept = interval_sums(np.add.reduceat(chain.activation_bytes, pieces))
        sums = interval_sums(np.add.reduceat(chain.reduction_bytes, pieces))
        self._sums: Floats = np.where(np.isfinite(sums), sums, 0.0)  # the computing is infinite there
        self._live = chain.crossing_bytes[self._edges]
        self._both = self._live[:, None] + self._live[None, :]
        self._barred = [self._barred_for(kind, pins) for kind in self.kinds]
        reach = np.array(reaches(parted, int(self._edges[-1])))
        self._both_parted = self._edges[None, :] > reach[self._edges][:, None]
        self._matrices: dict[tuple[int, int, bool, Group], tuple[Floats, Floats]] = {}
        self.calls = 0

    @property
    def pieces(self) -> int:
        """How many stages there can be at most."""
        return len(self._edges) - 1

    def best_cut(self, groups: Sequence[Group], within_ms: float = np.inf) -> tuple[float, Cuts]:
        """The step's time with the best cut for these groups, one for each stage, and the cut.

        Args:
            groups: of each stage.
            within_ms: a step that is known to be possible with them: a long chain is cut the sooner for it.

        Returns:
            Milliseconds and edges of the chain. What fits nowhere costs at least `NO_FIT`, and has no cut.
        """
        self.calls += 1
        stages = len(groups)
        if stages > self.pieces or not all(map(any, groups)):
            return np.inf, []
        windows = self._windows(groups, within_ms)
        matrices = [self._stage(stage, groups, window) for stage, window in enumerate(windows)]
        overs = [over for over, _ in matrices]
        least_over, cuts = least_bottleneck(overs)
        if not np.isfinite(least_over):
            excess, _ = least_bottleneck(
                [self._excess(stage, groups, window) for stage, window in enumerate(windows)]
            )
            return NO_FIT * max(1.0, excess), []
        chosen = self._edges_of(cuts, windows)
        best = self.forecast(chosen, groups).step_ms
        fills = [fill for _, fill in matrices]
        constant = self._constant_ms(groups)
        margin = abs(least_over)
        # the first bound is none: if nothing is left between its fill and the step, no cut is better
        for bound in (
            (UNBOUNDED, *(least_over + slack * margin + 1e-9 for slack in SLACK)) if stages > 1 else ()
        ):
            fill, cuts = least_sum(fills, overs, bound)
            if not cuts:
                continue
            edges = self._edges_of(cuts, windows)
            if (time := self.forecast(edges, groups).step_ms) < best - 1e-9:
                best, chosen = time, edges
            if bound == UNBOUNDED and fill + least_over + constant >= best - 1e-9:
                break
        return best, chosen

    def forecast(self, cuts: Cuts, groups: Sequence[Group]) -> StepForecast:
        """What a step takes.

        Args:
            cuts: (first, last) edge of the chain of each stage.
            groups: of each stage.
        """
        at = {int(edge): index for index, edge in enumerate(self._edges)}
        indices = [(at[first], at[last]) for first, last in cuts]
        stages = tuple(
            self._stage_forecast(stage, first, last, groups) for stage, (first, last) in enumerate(indices)
        )
        fills = [
            self._fill(stage, first, last, group)
            for stage, ((first, last), group) in enumerate(zip(indices, groups, strict=True))
        ]
        # each stage has its own microbatches to do, and waits for the others' part of one: the latest counts
        worst = max(range(len(stages)), key=lambda stage: stages[stage].total_ms - fills[stage])
        fill = sum(fills) - fills[worst]
        bottleneck = stages[worst].total_ms
        reduction = max(stage.reduction_ms for stage in stages)
        constant = self._constant_ms(groups)
        return StepForecast(
            step_ms=bottleneck + fill + reduction + constant,
            bottleneck_ms=bottleneck,
            fill_ms=fill,
            reduction_ms=reduction,
            constant_ms=constant,
            stages=stages,
        )

    def memory_bytes(self, first: int, last: int, in_flight: int) -> float:
        """Of one instance that has so many microbatches in flight at most; `first` and `last` are indices of
        the edges that may be cut."""
        flying = held(self.settings.microbatches, in_flight, self.settings.most_held)
        kept = self._kept[first, last] * flying + 2 * self._live[last] * flying
        return float((self._state[first, last] + kept) * self.settings.memory_factor)

    # --- parts ----------------------------------------------------------------------------------------
    def _barred_for(self, kind: InstanceKind, pins: Sequence[Sequence[str]]) -> Floats | None:
        """Layers that are pinned elsewhere, counted over intervals; None: none is."""
        missing = np.array([float(not set(labels) <= set(kind.labels)) for labels in pins])
        return interval_sums(np.add.reduceat(missing, self._edges[:-1])) if missing.any() else None

    def _speeds(self, group: Group) -> tuple[tuple[float, int], ...]:
        return tuple(
            sorted((kind.speed, count) for kind, count in zip(self.kinds, group, strict=True) if count)
        )

    def _per_byte_ms(self, group: Group) -> float:
        return 1e3 / self.settings.link_bytes_per_s / sum(group)

    def _reduction_ms_per_byte(self, group: Group) -> float:
        count = sum(group)
        return 1e3 * 2 * (count - 1) / count / self.settings.link_bytes_per_s

    def _constant_ms(self, groups: Sequence[Group]) -> float:
        return self.settings.constant_ms + self.settings.instance_ms * sum(map(sum, groups))

    def _windows(self, groups: Sequence[Group], within_ms: float) -> list[Window]:
        """Where each stage may begin and end in a step that is no longer than this.

        Such a step is at least what a stage computes for all microbatches, and what the others compute for
        one of them. So a stage has no more work than that leaves, and those before it no more than theirs.
        """
        stages = len(groups)
        whole = slice(0, self.pieces + 1)
        if not np.isfinite(within_ms):
            return [(whole, whole)] * stages
        work = np.concatenate([[0.0], self._work[0, 1:]])
        speeds = [self._speeds(group) for group in groups]
        soonest = 1 / max(fast[-1][0] for fast in speeds)
        spare = within_ms * (1 + 1e-9) - self._constant_ms(groups) - work[-1] * soonest
        most = [
            spare / beyond if (beyond := rounds(fast, self.settings.microbatches) - soonest) > 0 else np.inf
            for fast in speeds
        ]
        slack = 1e-9 * work[-1]
        reached = np.concatenate([[0.0], np.cumsum(most)])
        left = np.concatenate([np.cumsum(most[::-1])[::-1], [0.0]])
        edges = [
            slice(
                max(stage, int(np.searchsorted(work, work[-1] - left[stage] - slack))),
                min(
                    self.pieces - (stages - stage),
                    int(np.searchsorted(work, reached[stage] + slack, "right")) - 1,
                )
                + 1,
            )
            for stage in range(stages + 1)
        ]
        edges[0], edges[-1] = slice(0, 1), slice(self.pieces, self.pieces + 1)
        return list(pairwise(edges))

    def _edges_of(self, cuts: Cuts, windows: Sequence[Window]) -> Cuts:
        """Cuts of windows, as edges of the chain."""
        return [
            (int(self._edges[first + begins.start]), int(self._edges[last + ends.start]))
            for (first, last), (begins, ends) in zip(cuts, windows, strict=True)
        ]

    def _excess(self, stage: int, groups: Sequence[Group], window: Window) -> Floats:
        """By how much each interval is too large, or infinite where a pin forbids it."""
        group = groups[stage]
        flying = held(self.settings.microbatches, _in_flight(groups, stage), self.settings.most_held)
        kept = self._kept[window] * flying + 2 * self._live[None, window[1]] * flying
        need = (self._state[window] + kept) * self.settings.memory_factor
        rooms = [kind.memory_bytes for kind, count in zip(self.kinds, group, strict=True) if count]
        room = min((room for room in rooms if room), default=0)
        excess: Floats = need / room if room else np.where(np.isfinite(need), 0.0, np.inf)
        if self._both_parted.any():
            excess = np.where(self._both_parted[window], np.inf, excess)
        for barred, count in zip(self._barred, group, strict=True):
            if count and barred is not None:
                excess = np.where(barred[window] > 0, np.inf, excess)
        return excess

    def _stage(self, stage: int, groups: Sequence[Group], window: Window) -> tuple[Floats, Floats]:
        """(what it takes beyond its fill, fill) of each interval as this stage, ms of a step; the first is
        infinite where it may not be.

        A step is the sum of all fills and the most that a stage takes beyond its own.
        """
        group = groups[stage]
        whole = window[0].stop - window[0].start > self.pieces
        key = (len(groups) - stage, _in_flight(groups, stage), not stage, group)
        if whole and (kept := self._matrices.get(key)) is not None:
            return kept
        speeds, work = self._speeds(group), self._work[window]
        compute = work * rounds(speeds, self.settings.microbatches)
        link = self._both[window] * (self.settings.microbatches * self._per_byte_ms(group))
        cost = np.maximum(compute, link) + self._sums[window] * self._reduction_ms_per_byte(group)
        fits = (self._excess(stage, groups, window) <= 1.0) & np.isfinite(work)
        fill = work / speeds[-1][0]
        if stage:
            sent = 2e3 * self._live[window[0]] / self.settings.link_bytes_per_s
            fill = fill + (2 * self.settings.hop_ms + sent)[:, None]
        fill = np.where(fits, fill, 0.0)
        found = (np.where(fits, cost - fill, np.inf), fill)
        if whole and len(self._matrices) * self._work.size < 2e7:
            self._matrices[key] = found
        return found

    def _fill(self, stage: int, first: int, last: int, group: Group) -> float:
        fastest = self._speeds(group)[-1][0]
        hop = 2 * self.settings.hop_ms + 2e3 * self._live[first] / self.settings.link_bytes_per_s
        return float(self._work[first, last] / fastest + (hop if stage else 0.0))

    def _stage_forecast(self, stage: int, first: int, last: int, groups: Sequence[Group]) -> StageForecast:
        group = groups[stage]
        microbatches = self.settings.microbatches
        return StageForecast(
            first=int(self._edges[first]),
            last=int(self._edges[last]),
            instances=tuple((kind, count) for kind, count in zip(self.kinds, group, strict=True) if count),
            compute_ms=float(self._work[first, last]) * rounds(self._speeds(group), microbatches),
            link_ms=float(self._both[first, last]) * microbatches * self._per_byte_ms(group),
            reduction_ms=float(self._sums[first, last]) * self._reduction_ms_per_byte(group),
            memory_bytes=int(self.memory_bytes(first, last, _in_flight(groups, stage))),
        )


def _in_flight(groups: Sequence[Group], stage: int) -> int:
    later = sum(map(sum, groups[stage + 1 :]))
    return in_flight_before(len(groups) - stage - 1, later, sum(groups[stage]))
