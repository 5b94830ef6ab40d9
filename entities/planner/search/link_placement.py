"""Where units run so that the busiest link is least busy: tabu over swaps of places and moves to free slots.

It begins with a placement that keeps the constraints, and never makes a hard one worse. Preferred constraints
come before links, and links are weighed by the busiest one and, with a fifth of the weight, the mean of the
eight busiest.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entities.planner.constraints import PlaceConstraint, PlaceFacts
from entities.planner.search.access_routes import AccessRoutes
from entities.planner.search.layer_chain import Floats

MOST_UNITS = 512
"""Beyond these the first placement stays."""
LOOKED_AT = 64
"""Units of which it is seen, for each move, how much they load the busiest link."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How long is searched: moves, not seconds."""

    moves: int = 240
    stale_moves: int = 80
    hot_units: int = 5
    """Units that load the busiest link most: each is tried elsewhere."""
    targets: int = 20
    """Places that each of them is tried at."""
    tenure: int = 10
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class LinkProblem:
    """Units with their traffic, and slots on hosts.

    Attributes:
        traffic: bytes of a step by (unit, unit).
        slot_host: the host of each slot.
        slot_class: slots of a class are alike (speed, memory); a unit only changes within its slot's class.
        routes: between hosts.
        facts: of hosts.
        constraints: on units.
    """

    traffic: Mapping[tuple[int, int], float]
    slot_host: Sequence[int]
    slot_class: Sequence[int]
    routes: AccessRoutes
    facts: PlaceFacts
    constraints: Sequence[PlaceConstraint] = ()


@dataclass(frozen=True)
class LinkedPlaces:
    """The slot of each unit, and what the busiest link needs for a step."""

    slots: tuple[int, ...]
    busiest_ms: float
    before_ms: float
    """Of the placement that the search began with."""
    key: tuple[float, ...]
    """Breaches of hard and of preferred constraints, then links: the smaller, the better."""


def pipeline_traffic(
    replicas: Sequence[int],
    crossing_bytes: Sequence[float],
    reduction_bytes: Sequence[float],
    microbatches: int,
) -> dict[tuple[int, int], float]:
    """Bytes of a step between units numbered stage by stage: hops both ways, shared by load, and rings of
    sums.

    Args:
        replicas: of each stage.
        crossing_bytes: of a microbatch, at the boundary in front of each stage (that of stage 0 is not used).
        reduction_bytes: of the sums of each stage.
        microbatches: of a step.
    """
    first = [sum(replicas[:stage]) for stage in range(len(replicas))]
    traffic: dict[tuple[int, int], float] = defaultdict(float)
    for stage, count in enumerate(replicas):
        mine = range(first[stage], first[stage] + count)
        if stage:
            size = microbatches * crossing_bytes[stage] / (count * replicas[stage - 1])
            for upper in range(first[stage - 1], first[stage]):
                for unit in mine:
                    traffic[upper, unit] += size
                    traffic[unit, upper] += size
        if count > 1:
            for unit in mine:
                after = first[stage] + (unit - first[stage] + 1) % count
                traffic[unit, after] += 2 * (count - 1) / count * reduction_bytes[stage]
    return dict(traffic)


def place_on_links(
    problem: LinkProblem, start: Sequence[int], config: PlacementConfig = PlacementConfig()
) -> LinkedPlaces:
    """Improves a placement.

    Args:
        problem: what talks to whom, and over what.
        start: the slot of each unit.
        config: how long to search.
    """
    search = _PlaceSearch(problem, start, config)
    before = search.busiest_ms
    if 1 < len(start) <= MOST_UNITS:
        search.run()
    return LinkedPlaces(tuple(search.best), search.best_ms, before, search.best_key)


def link_loads(problem: LinkProblem, slots: Sequence[int]) -> Floats:
    """Milliseconds of a step that each link is busy: links between access points, then hosts' own, up and
    down."""
    return _PlaceSearch(problem, slots, PlacementConfig()).loads


class _PlaceSearch:
    def __init__(self, problem: LinkProblem, start: Sequence[int], config: PlacementConfig) -> None:
        self._problem, self._config = problem, config
        self._draws = random.Random(config.seed)
        routes = problem.routes
        self._hosts = len(routes.access)
        self._points = routes.shares.shape[0]
        self._links = len(routes.capacity)
        self._capacity = np.concatenate([routes.capacity, routes.host_capacity, routes.host_capacity])
        sends: list[list[tuple[int, float]]] = [[] for _ in start]
        takes: list[list[tuple[int, float]]] = [[] for _ in start]
        for (unit, other), size in problem.traffic.items():
            sends[unit].append((other, size))
            takes[other].append((unit, size))
        self._sends = [_columns(pairs) for pairs in sends]
        self._takes = [_columns(pairs) for pairs in takes]
        self._slots = list(start)
        self._host = np.array([problem.slot_host[slot] for slot in start], dtype=int)
        self._taken = {slot: unit for unit, slot in enumerate(start)}
        self._by_class: dict[int, list[int]] = defaultdict(list)
        for slot, kind in enumerate(problem.slot_class):
            self._by_class[kind].append(slot)
        self._touching: list[list[PlaceConstraint]] = [[] for _ in start]
        for constraint in problem.constraints:
            for unit in constraint.units:
                self._touching[unit].append(constraint)
        self._breaches = self._all_breaches()
        self.loads: Floats = np.zeros(len(self._capacity))
        for unit in range(len(start)):
            self.loads = self.loads + self._load_of(unit, int(self._host[unit]), whole=False)
        self.best_key = self._key(self.loads, self._breaches)
        self.best = list(self._slots)
        self.best_ms = self.busiest_ms

    @property
    def busiest_ms(self) -> float:
        return float(self.loads.max(initial=0.0))

    def run(self) -> None:
        until: dict[tuple[int, int], int] = {}
        stale = 0
        for move in range(self._config.moves):
            chosen = None
            for unit in self._hot_units():
                for slot in self._targets(unit):
                    found = self._try(unit, slot)
                    if found is None or (chosen is not None and found[0] >= chosen[0]):
                        continue
                    if found[0] < self.best_key or until.get((unit, slot), 0) <= move:
                        chosen = (*found, unit, slot)
            if chosen is None:
                stale += 1
            else:
                key, loads, breaches, unit, slot = chosen
                until[unit, self._slots[unit]] = move + 1 + self._config.tenure
                self._exchange(unit, slot)
                self.loads, self._breaches = loads, breaches
                if key < self.best_key:
                    self.best_key, self.best, self.best_ms, stale = key, list(self._slots), self.busiest_ms, 0
                else:
                    stale += 1
            if stale > self._config.stale_moves:
                return

    # --- moves ----------------------------------------------------------------------------------------
    def _hot_units(self) -> list[int]:
        """Units of constraints that are not kept, and those that load the busiest link most."""
        facts, constraints = self._problem.facts, self._problem.constraints
        astray = sorted(
            {
                unit
                for constraint in constraints
                if facts.breach(constraint, self._host)
                for unit in constraint.units
            }
        )
        if len(astray) > self._config.hot_units:
            astray = self._draws.sample(astray, self._config.hot_units)
        units: Sequence[int] = range(len(self._slots))
        if len(units) > LOOKED_AT:
            units = self._draws.sample(units, LOOKED_AT)
        hot = int(np.argmax(self.loads))
        parts = sorted(
            ((self._load_of(unit, int(self._host[unit]))[hot], unit) for unit in units), reverse=True
        )
        return astray + [unit for part, unit in parts[: self._config.hot_units] if part > 0]

    def _targets(self, unit: int) -> list[int]:
        mine = self._slots[unit]
        slots = self._by_class[self._problem.slot_class[mine]]
        chosen = (
            slots if len(slots) <= self._config.targets else self._draws.sample(slots, self._config.targets)
        )
        return [slot for slot in chosen if self._problem.slot_host[slot] != self._host[unit]]

    def _try(self, unit: int, slot: int) -> tuple[tuple[float, ...], Floats, tuple[int, int]] | None:
        """The key, loads and breaches after a unit goes to a slot; whoever has it goes where the unit was."""
        other = self._taken.get(slot)
        here, there = int(self._host[unit]), self._problem.slot_host[slot]
        touched = {id(constraint): constraint for constraint in self._touching[unit]}
        if other is not None:
            touched |= {id(constraint): constraint for constraint in self._touching[other]}
        before = self._breach_sum(touched.values())
        loads = self.loads - self._load_of(unit, here) + self._load_of(unit, there)
        self._host[unit] = there
        if other is not None:
            loads = loads - self._load_of(other, there) + self._load_of(other, here)
            self._host[other] = here
        after = self._breach_sum(touched.values())
        self._host[unit] = here
        if other is not None:
            self._host[other] = there
        if after[0] > before[0]:
            return None
        breaches = (self._breaches[0] + after[0] - before[0], self._breaches[1] + after[1] - before[1])
        return self._key(loads, breaches), loads, breaches

    def _exchange(self, unit: int, slot: int) -> None:
        other, mine = self._taken.get(slot), self._slots[unit]
        del self._taken[mine]
        if other is not None:
            self._slots[other], self._taken[mine] = mine, other
            self._host[other] = self._problem.slot_host[mine]
        self._slots[unit], self._taken[slot] = slot, unit
        self._host[unit] = self._problem.slot_host[slot]

    # --- value ----------------------------------------------------------------------------------------
    def _key(self, loads: Floats, breaches: tuple[int, int]) -> tuple[float, ...]:
        top = np.partition(loads, -8)[-8:] if len(loads) > 8 else loads
        return (*breaches, float(0.8 * loads.max(initial=0.0) + 0.2 * (top.mean() if len(top) else 0.0)))

    def _breach_sum(self, constraints: Iterable[PlaceConstraint]) -> tuple[int, int]:
        hard = preferred = 0
        for constraint in constraints:
            breach = self._problem.facts.breach(constraint, self._host)
            if constraint.hard:
                hard += breach
            else:
                preferred += breach
        return hard, preferred

    def _all_breaches(self) -> tuple[int, int]:
        return self._breach_sum(self._problem.constraints)

    def _load_of(self, unit: int, host: int, *, whole: bool = True) -> Floats:
        """What a unit's traffic does to each link if it is on a host, ms. `whole` False: only what it sends.
        What a unit's traffic does to each link if it is on a host, ms. `whole` False: only what it sends."""
        routes = self._problem.routes
        point = routes.access[host]
        loads = np.zeros(len(self._capacity))
        ups, downs = loads[self._links : self._links + self._hosts], loads[self._links + self._hosts :]
        for pairs, outward in ((self._sends[unit], True), (self._takes[unit], False)):
            if not outward and not whole:
                continue
            others, sizes = pairs
            hosts = self._host[others]
            by_host = np.bincount(hosts, weights=sizes, minlength=self._hosts)
            by_host[host] = 0.0
            by_point = np.bincount(routes.access, weights=by_host, minlength=self._points)
            shares = routes.shares[point] if outward else routes.shares[:, point]
            loads[: self._links] += by_point @ shares
            near, far = (ups, downs) if outward else (downs, ups)
            near[host] += by_host.sum()
            far += by_host
        busy: Floats = loads / self._capacity
        return busy


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[np.ndarray, Floats]:
    return np.array([other for other, _ in pairs], dtype=int), np.array(
        [size for _, size in pairs], dtype=float
    )
