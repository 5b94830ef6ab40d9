"""A plan in some milliseconds, in pure Python: for small jobs the exact one, for others one to fall back on.

The leader calls it on its own loop: `is_small` says whether the exact cut is cheap enough there. Without it
the cut follows equal shares of work. Slots are taken as they come; the planning process knows better where
they differ.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate, pairwise

from entities.planner.abandoned_work import stop_if_abandoned
from entities.planner.constraints import broken_by
from entities.planner.first_placement import NeededPlace, NodeRoom, NothingFits, place_first
from entities.planner.layer_rules import in_words, reaches
from entities.planner.plan_request import (
    Alternative,
    NoPlan,
    PlanAnswer,
    PlannedStep,
    PlanRequest,
    UnitPlace,
)
from entities.planner.windows import held, in_flight
from schemas.plain_text import shown

MOST_STEPS = 12_500
"""Of the exact cut's innermost loop: some 10 ms."""
MOST_STEPS_OF_OTHERS = 3_000
"""Likewise, for each alternative that is shown beside it."""
MOST_UNITS = 256
ALTERNATIVES = 3
"""Other plans that are shown beside it, where there are so many."""

EXACT, BY_SHARES = "at once, exactly", "at once, by equal shares of work"

Cut = tuple[int, int]


def is_small(request: PlanRequest) -> bool:
    """Whether the plan at once is the best one: slots alike, nothing left to choose but the cut, and that
    cheap."""
    if request.stages is None or request.replicas is None or request.rules or request.hosts:
        return False
    if any(layer.pinned_to for layer in request.layers):
        return False
    edges = len(request.edges or request.layers)
    alike = len({slot.speed for slot in request.slots}) <= 1
    units = sum(request.replicas) + sum(request.standbys)
    return alike and edges * edges * request.stages / 2 <= MOST_STEPS and units <= MOST_UNITS


def is_exact(answer: PlanAnswer) -> bool:
    """Whether a plan made at once has the exact cut: there is none with a lower bottleneck."""
    return answer.planned_by == EXACT


def plan_at_once(request: PlanRequest) -> PlanAnswer:
    """Cuts and places without a search.

    Raises:
        NoPlan: it does not fit into the free slots.
    """
    stop_if_abandoned()
    replicas, standbys = _shape(request)
    if len(request.slots) < sum(replicas) + sum(standbys):
        raise NoPlan(
            f"needs {sum(replicas) + sum(standbys)} slots, {len(request.slots)} are free", never=False
        )
    costs = _StageCosts(request, replicas)
    exact = costs.exact() if is_small(request) else None
    cuts = exact or costs.equal_shares()
    how = EXACT if exact else BY_SHARES
    memory = [costs.memory(stage, first, last) for stage, (first, last) in enumerate(cuts)]
    try:
        places = _places(request, cuts, replicas, standbys, memory)
    except NoPlan as refused:
        # another cut may fit: only a layer that fits nowhere is without hope
        never = refused.never and costs.hopeless()
        raise NoPlan(str(refused), never=never, needs_bytes=refused.needs_bytes) from None
    if broken := broken_by(request, cuts, places):
        raise NoPlan(f"{broken}, which the places that are free do not keep as they come", never=False)
    forecast = costs.forecast(cuts, memory)
    others = _others(request, forecast) if exact else ()
    times = ", ".join(f"stage {stage} {time:.1f} ms" for stage, time in enumerate(forecast.stage_ms))
    notes = ""
    if exact and len(others) < ALTERNATIVES:
        notes = f"; no more than {len(others)} other plan{'' if len(others) == 1 else 's'} found"
    if request.unkept:
        notes += f"; not kept: {', '.join(request.unkept)}"
    return PlanAnswer(
        cuts=tuple(cuts),
        replicas=tuple(replicas),
        places=places,
        forecast=forecast,
        reason=f"cut by measured time ({how}): {times} of a step of {forecast.step_ms:.0f} ms{notes}",
        alternatives=others,
        planned_by=how,
    )


def _others(request: PlanRequest, chosen: PlannedStep) -> tuple[Alternative, ...]:
    """What fewer and more stages on as many slots would take, as many layers for each stage, and an instance
    fewer where there are most: three of these, if there are so many."""
    stages, total = len(request.replicas or ()), sum(request.replicas or ())
    edges = request.edges or tuple(range(len(request.layers) + 1))
    if len(edges) * len(edges) * stages > MOST_STEPS_OF_OTHERS:
        return ()
    found: list[tuple[str, PlannedStep | None]] = []
    for count in (stages - 1, stages + 1):
        if 1 <= count <= min(total, len(edges) - 1):
            replicas = tuple((at + 1) * total // count - at * total // count for at in range(count))
            costs = _StageCosts(replace(request, stages=count, replicas=replicas), replicas)
            instances = f"{total} instance{'s' if total > 1 else ''}"
            name = f"{count} stage{'s' if count > 1 else ''} of {instances} in all"
            cut = costs.exact()
            found.append((name, costs.forecast(cut, chosen.memory_bytes) if cut else None))
    replicas = request.replicas or ()
    even = [edges[at * (len(edges) - 1) // stages] for at in range(stages + 1)]
    if stages > 1:
        costs = _StageCosts(request, replicas)
        forecast = costs.forecast(list(pairwise(even)), chosen.memory_bytes)
        found.append(("as many layers in each stage", forecast))
    largest = max(replicas)
    if largest > 1 and len(found) < ALTERNATIVES:
        at = replicas.index(largest)
        fewer = (*replicas[:at], largest - 1, *replicas[at + 1 :])
        costs = _StageCosts(replace(request, replicas=fewer), fewer)
        cut = costs.exact()
        name = f"an instance fewer in stage {at}"
        found.append((name, costs.forecast(cut, chosen.memory_bytes) if cut else None))
    return tuple(
        Alternative(name, other.step_ms if other else None, _why_not(other, chosen))
        for name, other in found[:ALTERNATIVES]
    )


def _why_not(other: PlannedStep | None, chosen: PlannedStep) -> str:
    if other is None:
        return "its stages fit into no slot"
    difference = other.step_ms - chosen.step_ms
    if difference < 0:
        return f"{-difference:.0f} ms shorter: the job asks for other stages or replicas"
    return f"{difference:.0f} ms longer" if difference > 0.05 else "as long"


def cut_at_once(request: PlanRequest) -> tuple[Cut, ...]:
    """The cut alone, whatever slots are free; exact where that is cheap.

    Raises:
        NoPlan: there are more stages than pieces.
    """
    stop_if_abandoned()
    costs = _StageCosts(request, _shape(request)[0])
    return tuple((costs.exact() if is_small(request) else None) or costs.equal_shares())


def steps_ms(request: PlanRequest, cuts: Sequence[Cut], counts: Sequence[int]) -> tuple[float, ...]:
    """The forecast step of the same cut with each of these numbers of replicas of every stage."""
    costs = _StageCosts(request, (1,) * len(cuts))
    return tuple(costs.with_replicas((count,) * len(cuts)).forecast(cuts, ()).step_ms for count in counts)


def _shape(request: PlanRequest) -> tuple[Sequence[int], Sequence[int]]:
    if request.replicas is not None:
        replicas = request.replicas
    elif request.stages is not None:
        free = len(request.slots) - sum(request.standbys)
        replicas = (max(1, min(request.microbatches, free // request.stages)),) * request.stages
    else:
        replicas = (max(1, min(request.microbatches, len(request.slots))),)
    return replicas, request.standbys or (0,) * len(replicas)


class _StageCosts:
    """Costs of intervals of layers, for instances at the slowest slot's speed."""

    def __init__(self, request: PlanRequest, replicas: Sequence[int]) -> None:
        self._request = request
        layers = request.layers
        self._speed = min((slot.speed for slot in request.slots), default=1.0)
        self._rooms = sorted((slot.memory_bytes or math.inf for slot in request.slots), reverse=True)
        self._work = [0.0, *accumulate(layer.work_ms for layer in layers)]
        self._state = [0.0, *accumulate(layer.state_bytes for layer in layers)]
        self._kept = [0.0, *accumulate(layer.activation_bytes for layer in layers)]
        self._sums = [0.0, *accumulate(layer.sums_bytes for layer in layers)]
        self._live = [request.input_bytes, *(layer.output_bytes for layer in layers)]
        self._live[-1] = 0.0
        self._edges = list(request.edges) or list(range(len(layers) + 1))
        self._reach = reaches(request.parted, len(layers))
        self._take(replicas)

    def _take(self, replicas: Sequence[int]) -> None:
        self._replicas = replicas
        wanted = sum(replicas) + sum(self._request.standbys)
        self._room = self._rooms[min(wanted, len(self._rooms)) - 1] if self._rooms else math.inf
        """The smallest of as many slots as there are instances, the largest ones: what fits has a place."""
        self._rounds = [math.ceil(self._request.microbatches / count) / self._speed for count in replicas]

    def with_replicas(self, replicas: Sequence[int]) -> _StageCosts:
        """The same layers and slots with other numbers of instances; what is summed over layers is shared."""
        other = copy(self)
        other._take(replicas)
        return other

    def stage_ms(self, stage: int, first: int, last: int) -> float:
        """Of a step, without the reduction."""
        compute = (self._work[last] - self._work[first]) * self._rounds[stage]
        both = self._live[first] + self._live[last]
        moved = both * self._request.microbatches / self._replicas[stage]
        return max(compute, 1e3 * moved / self._request.link_bytes_per_s)

    def reduction_ms(self, stage: int, first: int, last: int) -> float:
        count = self._replicas[stage]
        moved = 2 * (count - 1) / count * (self._sums[last] - self._sums[first])
        return 1e3 * moved / self._request.link_bytes_per_s

    def memory(self, stage: int, first: int, last: int) -> int:
        """Bytes of one instance."""
        flying = held(
            self._request.microbatches,
            in_flight(self._replicas, stage),
            self._request.most_held,
        )
        kept = self._kept[last] - self._kept[first] + 2 * self._live[last]
        return int((self._state[last] - self._state[first] + kept * flying) * self._request.memory_factor)

    def exact(self) -> list[Cut] | None:
        """The cut with the least bottleneck, then the fewest bytes over boundaries; None: nothing fits."""
        edges, stages = self._edges, len(self._replicas)
        unset = (math.inf, math.inf, -1)
        best = [{0: (0.0, 0.0, -1)}]
        for stage in range(stages):
            row: dict[int, tuple[float, float, int]] = {}
            for at in range(stage + 1, len(edges) - (stages - stage - 1)):
                found = unset
                for before in range(stage, at):
                    reached = best[stage].get(before)
                    if reached is None:
                        continue
                    first, last = edges[before], edges[at]
                    cost = self.stage_ms(stage, first, last) + self.reduction_ms(stage, first, last)
                    crossed = reached[1] + (self._live[first] if stage else 0.0)
                    candidate = (max(reached[0], cost), crossed, before)
                    if candidate < found and self._fits(stage, first, last):
                        found = candidate
                if found is not unset:
                    row[at] = found
            best.append(row)
        if len(edges) - 1 not in best[stages]:
            return None
        cuts = []
        at = len(edges) - 1
        for stage in range(stages, 0, -1):
            before = best[stage][at][2]
            cuts.append((edges[before], edges[at]))
            at = before
        return cuts[::-1]

    def equal_shares(self) -> list[Cut]:
        """Boundaries as near as possible to where each stage has its share of the work."""
        edges, stages = self._edges, len(self._replicas)
        if stages > len(edges) - 1:
            raise NoPlan(f"{stages} stages, but the model can be cut into {len(edges) - 1}: set fewer stages")
        shares = [0.0, *accumulate(1 / rounds for rounds in self._rounds)]
        walls = self._walls()
        chosen = [0]
        for stage in range(1, stages):
            wanted = self._work[-1] * shares[stage] / shares[-1]
            ahead = walls[bisect_right(walls, chosen[-1]) :]
            most = ahead[0] if ahead else len(edges) - 1
            if len(ahead) >= stages - stage:  # each wall that is left needs a boundary
                candidates = range(most, most + 1)
            else:
                candidates = range(chosen[-1] + 1, min(most + 1, len(edges) - (stages - stage)))
            chosen.append(min(candidates, key=lambda at: abs(self._work[edges[at]] - wanted)))
        return list(pairwise([*(edges[at] for at in chosen), edges[-1]]))

    def _walls(self) -> list[int]:
        """Edges that part all parted layers, by number, ascending; as few as do."""
        found: list[int] = []
        for lower, upper, _ in sorted(self._request.parted, key=lambda pair: pair[1]):
            if not found or self._edges[found[-1]] <= lower:
                found.append(bisect_right(self._edges, upper) - 1)
        return found

    def hopeless(self) -> bool:
        """Whether some piece that can't be cut needs more than any slot has, in whichever stage."""
        room = max((slot.memory_bytes for slot in self._request.slots), default=0)
        stages = range(len(self._replicas))
        return bool(room) and any(
            min(self.memory(stage, first, last) for stage in stages) > room
            for first, last in pairwise(self._edges)
        )

    def _fits(self, stage: int, first: int, last: int) -> bool:
        return last <= self._reach[first] and self.memory(stage, first, last) <= self._room

    def forecast(self, cuts: Sequence[Cut], memory: Sequence[int]) -> PlannedStep:
        stages = range(len(cuts))
        times = [self.stage_ms(stage, *cuts[stage]) for stage in stages]
        bytes_per_s = self._request.link_bytes_per_s
        fills = [
            (self._work[last] - self._work[first]) / self._speed
            + (2 * self._request.hop_ms + 2e3 * self._live[first] / bytes_per_s if first else 0.0)
            for first, last in cuts
        ]
        reduction = max(self.reduction_ms(stage, *cuts[stage]) for stage in stages)
        # each stage has its own microbatches to do, and waits for the others' part of one: the latest counts
        worst = max(stages, key=lambda stage: times[stage] - fills[stage])
        fill = sum(fills) - fills[worst]
        constant = self._request.constant_ms + self._request.instance_ms * sum(self._replicas)
        return PlannedStep(
            step_ms=times[worst] + fill + reduction + constant,
            bottleneck_ms=times[worst],
            fill_ms=fill,
            reduction_ms=reduction,
            constant_ms=constant,
            stage_ms=tuple(times),
            memory_bytes=tuple(memory),
        )


def _places(
    request: PlanRequest,
    cuts: Sequence[Cut],
    replicas: Sequence[int],
    standbys: Sequence[int],
    memory: Sequence[int],
) -> tuple[UnitPlace, ...]:
    labels = [
        frozenset(label for layer in request.layers[first:last] for label in layer.pinned_to)
        for first, last in cuts
    ]
    units = [
        NeededPlace(stage, replica, memory[stage], labels[stage])
        for stage, count in enumerate(replicas)
        for replica in range(count + standbys[stage])
    ]
    return places_of(request, units)


def places_of(request: PlanRequest, units: Sequence[NeededPlace]) -> tuple[UnitPlace, ...]:
    """The first placement of units into the request's slots.

    Raises:
        NoPlan: some unit fits into no slot that is left: which, and by how much.
    """
    number = {(slot.node, slot.index): at for at, slot in enumerate(request.slots)}
    by_node: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for slot in request.slots:
        by_node[slot.node, slot.cluster].append((slot.index, slot.memory_bytes))
    labels = {(slot.node, slot.index): frozenset(slot.labels) for slot in request.slots}
    nodes = [
        NodeRoom(sid, cluster, tuple(slots), {index: labels[sid, index] for index, _ in slots})
        for (sid, cluster), slots in sorted(by_node.items())
    ]
    found = place_first(units, nodes, request.clusters)
    if isinstance(found, NothingFits):
        raise too_small(units[found.unit], found.largest_bytes, request)
    return tuple(
        UnitPlace(unit.stage, unit.replica, number[nodes[node].sid, index])
        for unit, (node, index) in zip(units, found, strict=True)
    )


def too_small(unit: NeededPlace, largest_left: int, request: PlanRequest) -> NoPlan:
    """Why a unit has no slot: which, how much it needs, and what there is."""
    if unit.labels:
        wanted = " and ".join(map(in_words, sorted(unit.labels)))
        have = sum(unit.labels <= set(slot.labels) for slot in request.slots)
        return NoPlan(
            f"stage {unit.stage} is pinned to {wanted}: {have} free slots have that, and its instances need "
            "more, or larger ones: wait, set fewer replicas of it, or give the label to more nodes",
            never=False,
        )
    largest = max((slot.memory_bytes for slot in request.slots), default=0)
    need, never = unit.memory_bytes, unit.memory_bytes > largest
    room = largest if never else largest_left
    where = "the largest slot" if never else "the largest slot that is left"
    return NoPlan(
        f"stage {unit.stage} needs {shown(need)} in each instance, {where} has "
        f"{shown(room)} ({shown(need - room)} too little): set more parallel.stages "
        "or fewer training.microbatch_samples, or join a larger node",
        never=never,
        needs_bytes=need,
    )
