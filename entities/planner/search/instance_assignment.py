"""Which instances work for which stage, where they differ in speed and memory: tabu over counts.

Instances of one kind are alike, so an assignment is a table of counts (stage × kind), with a last row for
those that stay unused. A move takes some of a kind from one row to another; a swap exchanges two kinds
between rows. Each table is judged by the exact cut for it (`StepCost.best_cut`). The search is
deterministic: it counts evaluations, not seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from entities.planner.search.chain_cut import Cuts
from entities.planner.search.step_cost import Group, StepCost

Table = tuple[Group, ...]
"""One row for each stage, and one for the unused; a row counts instances of each kind."""


@dataclass(frozen=True, kw_only=True)
class AssignmentConfig:
    """How long is searched."""

    restarts: int = 7
    stale_moves: int = 20
    """A start ends after so many moves without a better table."""
    evaluations: int = 4_000
    """Of cuts, for each number of stages."""
    candidates: int = 120
    """Tables that are weighed for each move."""
    tenure: int = 4
    """For so many moves, and up to twice as many, a kind does not go back to a row."""
    seed: int = 0


@dataclass(frozen=True)
class AssignedStages:
    """A table with its best cut. `step_ms` is at least `NO_FIT` where nothing fits."""

    step_ms: float
    groups: tuple[Group, ...]
    cuts: Cuts
    unused: Group

    @property
    def instances(self) -> int:
        return sum(map(sum, self.groups))


def assign_instances(
    cost: StepCost,
    counts: Sequence[int],
    stages: int,
    *,
    shape: Sequence[int] | None = None,
    config: AssignmentConfig = AssignmentConfig(),
) -> AssignedStages:
    """The best table that was found for a number of stages.

    Args:
        cost: of the chain.
        counts: how many instances of each kind there are.
        stages: at most `cost.pieces`, and no more than there are instances.
        shape: how many instances each stage has; none: any number of them, and some may stay unused.
        config: how long to search.
    """
    return best_assignments(cost, counts, stages, shape=shape, config=config, most=1)[0]


def best_assignments(
    cost: StepCost,
    counts: Sequence[int],
    stages: int,
    *,
    most: int,
    shape: Sequence[int] | None = None,
    config: AssignmentConfig = AssignmentConfig(),
) -> list[AssignedStages]:
    """The best tables that were found, at most so many, the best one first; see `assign_instances`."""
    return _TableSearch(cost, tuple(counts), stages, shape, config).run(most)


class _TableSearch:
    def __init__(
        self,
        cost: StepCost,
        counts: Group,
        stages: int,
        shape: Sequence[int] | None,
        config: AssignmentConfig,
    ) -> None:
        self._cost, self._counts, self._stages, self._config = cost, counts, stages, config
        self._shape = tuple(shape) if shape is not None else None
        self._draws = random.Random(config.seed * 1009 + stages)
        self._known: dict[Table, tuple[float, Cuts]] = {}
        self._best = float("inf")
        self._table: Table = ()
        self._limit = 0

    def run(self, most: int) -> list[AssignedStages]:
        for number in range(self._config.restarts):
            self._limit = (number + 1) * self._config.evaluations // self._config.restarts
            self._walk(self._start(number))
        others = sorted(
            (found[0], table) for table, found in self._known.items() if table != self._table and found[1]
        )
        return [
            AssignedStages(self._known[table][0], table[:-1], self._known[table][1], table[-1])
            for table in (self._table, *(table for _, table in others[: most - 1]))
        ]

    def _value(self, table: Table) -> float:
        if (known := self._known.get(table)) is None:
            known = self._known[table] = self._cost.best_cut(table[:-1])
            if known[0] < self._best - 1e-9 or not self._table:
                self._best, self._table = known[0], table
        return known[0]

    def _walk(self, table: Table) -> None:
        value, stale, move = self._value(table), 0, 0
        until: dict[tuple[int, int], int] = {}
        best = value
        while stale < self._config.stale_moves and len(self._known) < self._limit:
            move += 1
            chosen: tuple[float, Table, tuple[tuple[int, int], ...]] | None = None
            for other, left in self._neighbours(table):
                found = self._value(other)
                if chosen is not None and found >= chosen[0]:
                    continue
                entered = _entered(table, other)
                if found < best - 1e-9 or all(until.get(place, 0) <= move for place in entered):
                    chosen = (found, other, left)
            if chosen is None:
                return
            value, table, left = chosen
            for place in left:
                until[place] = move + self._config.tenure + self._draws.randrange(self._config.tenure)
            stale = 0 if value < best - 1e-9 else stale + 1
            best = min(best, value)

    def _start(self, number: int) -> Table:
        """The fewest instances, equal parts in order of memory, in turn by speed, then at random.

        The fewest: a stage's second instance brings a reduction, which is a step up before it is a way down.
        """
        if self._shape is None:
            if number == 0:
                return self._fewest()
            number -= 1
        kinds = [kind for kind, count in enumerate(self._counts) for _ in range(count)]
        described = self._cost.kinds
        if number == 0:
            kinds.sort(key=lambda kind: described[kind].memory_bytes)
        elif number == 1:
            kinds.sort(key=lambda kind: -described[kind].speed)
        else:
            self._draws.shuffle(kinds)
        sizes = self._shape or _equal_parts(len(kinds), self._stages)
        rows = [[0] * len(self._counts) for _ in range(self._stages + 1)]
        if number % 2 == 0:
            places = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        else:
            most = max(sizes)
            places = [stage for turn in range(most) for stage, size in enumerate(sizes) if turn < size]
        for at, kind in enumerate(kinds):
            rows[places[at] if at < len(places) else self._stages][kind] += 1
        return tuple(map(tuple, rows))

    def _fewest(self) -> Table:
        """One instance for each stage: the fastest ones, the largest first."""
        described = self._cost.kinds
        kinds = [kind for kind, count in enumerate(self._counts) for _ in range(count)]
        kinds.sort(key=lambda kind: (-described[kind].speed, -described[kind].memory_bytes))
        rows = [[0] * len(self._counts) for _ in range(self._stages + 1)]
        for at, kind in enumerate(kinds):
            rows[min(at, self._stages)][kind] += 1
        return tuple(map(tuple, rows))

    def _neighbours(self, table: Table) -> Iterator[tuple[Table, tuple[tuple[int, int], ...]]]:
        """Tables one move away, and the (kind, row) pairs that are left by it."""
        choices = list(self._moves(table)) if self._shape is None else []
        choices += list(self._swaps(table))
        if len(choices) > self._config.candidates:
            choices = self._draws.sample(choices, self._config.candidates)
        for changes in choices:
            rows = [list(row) for row in table]
            for kind, source, target, amount in changes:
                rows[source][kind] -= amount
                rows[target][kind] += amount
            if all(map(any, rows[:-1])):
                yield tuple(map(tuple, rows)), tuple((kind, source) for kind, source, _, _ in changes)

    def _moves(self, table: Table) -> Iterator[tuple[tuple[int, int, int, int], ...]]:
        for source, row in enumerate(table):
            for kind, count in enumerate(row):
                for target in range(len(table)):
                    if not count or target == source:
                        continue
                    yield ((kind, source, target, 1),)
                    if count >= 8:
                        yield ((kind, source, target, count // 4),)

    def _swaps(self, table: Table) -> Iterator[tuple[tuple[int, int, int, int], ...]]:
        for first in range(len(table)):
            for second in range(first + 1, len(table)):
                for kind, count in enumerate(table[first]):
                    for other, others in enumerate(table[second]):
                        if count and others and kind != other:
                            yield ((kind, first, second, 1), (other, second, first, 1))


def _entered(table: Table, other: Table) -> tuple[tuple[int, int], ...]:
    return tuple(
        (kind, row)
        for row, (before, after) in enumerate(zip(table, other, strict=True))
        for kind, (had, has) in enumerate(zip(before, after, strict=True))
        if has > had
    )


def _equal_parts(count: int, parts: int) -> list[int]:
    return [(part + 1) * count // parts - part * count // parts for part in range(parts)]
