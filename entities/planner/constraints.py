"""What a placement must or should keep: `spread`, `together`, `apart`, `pin` on the instances of a plan.

They are made of what users say of layers (`layer_rules`). Hard ones are kept or there is no plan; preferred
ones are priced before the busiest link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsInt

from entities.planner.layer_rules import in_words, reaches
from entities.planner.plan_request import LayerRule, PlanRequest, UnitPlace


class HostOf(Protocol):
    """The host of each unit: a list, or an array."""

    def __getitem__(self, unit: int, /) -> SupportsInt: ...


@dataclass(frozen=True, kw_only=True)
class PlaceConstraint:
    """One constraint on units.

    `spread` and `apart`: different places; `together`: one place; `pin`: places with a label.
    """

    kind: Literal["spread", "together", "apart", "pin"]
    units: tuple[int, ...]
    scope: Literal["node", "cluster"] = "node"
    label: str = ""
    hard: bool = False
    name: str = ""
    """What the user called it, for messages; empty: its kind."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Of `apart`: only units of different groups have to be in different places; empty: all have to."""

    @property
    def shown(self) -> str:
        return self.name or f"{self.kind} ({self.scope})"


@dataclass(frozen=True)
class PlaceFacts:
    """What constraints look at, for each host: its cluster and labels."""

    cluster: tuple[str, ...]
    labels: tuple[frozenset[str], ...]

    def breach(self, constraint: PlaceConstraint, host_of: HostOf) -> int:
        """How far a placement is from a constraint: pairs in one place, units elsewhere; 0: it is kept."""
        if constraint.groups:
            return self._mixed(constraint, host_of)
        hosts = [int(host_of[unit]) for unit in constraint.units]
        if constraint.kind == "pin":
            return sum(constraint.label not in self.labels[host] for host in hosts)
        places = Counter(hosts if constraint.scope == "node" else [self.cluster[host] for host in hosts])
        if constraint.kind == "together":
            return len(hosts) - max(places.values(), default=0)
        return sum(count * (count - 1) // 2 for count in places.values())

    def _mixed(self, constraint: PlaceConstraint, host_of: HostOf) -> int:
        """Pairs of units of different groups in one place."""
        all_units, alike = Counter[int | str](), 0
        for group in constraint.groups:
            mine = Counter[int | str]()
            for unit in group:
                host = int(host_of[unit])
                mine[host if constraint.scope == "node" else self.cluster[host]] += 1
            alike += sum(count * (count - 1) // 2 for count in mine.values())
            all_units.update(mine)
        return sum(count * (count - 1) // 2 for count in all_units.values()) - alike


def constraints_on_units(
    rules: Iterable[LayerRule], cuts: Sequence[tuple[int, int]], units: Sequence[UnitPlace]
) -> list[PlaceConstraint]:
    """What rules on layers say of the instances of a plan, which are numbered as `units`."""
    members: dict[int, list[int]] = defaultdict(list)
    for at, unit in enumerate(units):
        members[unit.stage].append(at)

    def units_of(layers: Iterable[int]) -> tuple[int, ...]:
        chosen = set(layers)
        stages = [
            stage for stage, (first, last) in enumerate(cuts) if not chosen.isdisjoint(range(first, last))
        ]
        return tuple(at for stage in stages for at in members[stage])

    found = []
    for rule in rules:
        if rule.kind == "order" or rule.scope == "stage":
            continue
        mine = units_of(rule.layers)
        if rule.kind == "spread":
            groups: tuple[tuple[int, ...], ...] = ()
            parts = [tuple(at for at in mine if units[at].stage == stage) for stage in range(len(cuts))]
            split = [(part, groups) for part in parts if len(part) > 1]
        else:
            groups = tuple(map(units_of, rule.groups)) if rule.kind == "apart" else ()
            split = [(mine, groups)]
        found += [
            PlaceConstraint(
                kind=rule.kind,
                units=part,
                scope=rule.scope,
                label=rule.label,
                hard=rule.hard,
                name=rule.name,
                groups=groups,
            )
            for part, groups in split
        ]
    return found


def broken_by(request: PlanRequest, cuts: Sequence[tuple[int, int]], units: Sequence[UnitPlace]) -> str:
    """What of the request's hard rules these cuts and places do not keep, in words; empty: nothing."""
    reach = reaches(request.parted, len(request.layers))
    for first, last in cuts:
        if last > reach[first]:
            lower, upper, name = next(pair for pair in request.parted if first <= pair[0] and pair[1] < last)
            return f"{name} parts {request.layers[lower].name} and {request.layers[upper].name}"
    pinned: list[dict[tuple[str, ...], str]] = [{} for _ in cuts]  # the first layer with each set of labels
    for names, cut in zip(pinned, cuts, strict=True):
        for layer in request.layers[slice(*cut)]:
            names.setdefault(layer.pinned_to, layer.name)
    for stage, labels in {(unit.stage, request.slots[unit.slot].labels): None for unit in units}:
        for wanted, name in pinned[stage].items():
            if missing := [label for label in wanted if label not in labels]:
                return f"{name} is pinned to {in_words(missing[0])}"
    nodes = sorted({(slot.node, slot.cluster) for slot in request.slots})
    facts = PlaceFacts(tuple(cluster for _, cluster in nodes), (frozenset(),) * len(nodes))
    number = {node: at for at, (node, _) in enumerate(nodes)}
    hosts = [number[request.slots[unit.slot].node] for unit in units]
    hard = [rule for rule in request.rules if rule.hard]
    for constraint in constraints_on_units(hard, cuts, units):
        if facts.breach(constraint, hosts):
            return constraint.shown
    return ""
