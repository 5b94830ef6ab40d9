"""What a placement must or should keep: `spread`, `together`, `apart`, `pin` (draft §4.5(2)).

`order` and memory are no matter of places: the cut keeps the order, and `StepCost` and `first_placement` the
memory. Hard constraints are kept or there is no plan; preferred ones are priced before the busiest link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol, SupportsInt

from entities.planner.plan_request import NoPlan


class HostOf(Protocol):
    """The host of each unit: a list, or an array."""

    def __getitem__(self, unit: int, /) -> SupportsInt: ...


ConstraintKind = Literal["spread", "together", "apart", "pin"]


@dataclass(frozen=True, kw_only=True)
class PlaceConstraint:
    """One constraint on units.

    `spread` and `apart`: different places; `together`: one place; `pin`: places with a label.
    """

    kind: ConstraintKind
    units: tuple[int, ...]
    scope: Literal["node", "cluster"] = "node"
    label: str = ""
    hard: bool = False
    name: str = ""
    """What the user called it, for messages; empty: its kind."""

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
        hosts = [int(host_of[unit]) for unit in constraint.units]
        if constraint.kind == "pin":
            return sum(constraint.label not in self.labels[host] for host in hosts)
        places = Counter(hosts if constraint.scope == "node" else [self.cluster[host] for host in hosts])
        if constraint.kind == "together":
            return len(hosts) - max(places.values(), default=0)
        return sum(count * (count - 1) // 2 for count in places.values())


def check_constraints(constraints: Sequence[PlaceConstraint], facts: PlaceFacts) -> None:
    """Finds what can't be kept whatever is placed where.

    Raises:
        NoPlan: a pin names a label that no host has; or two hard constraints contradict each other, both
            named.
    """
    have = frozenset[str]().union(*facts.labels) if facts.labels else frozenset()
    hard = [constraint for constraint in constraints if constraint.hard]
    for constraint in hard:
        if constraint.kind == "pin" and constraint.label not in have:
            shown = ", ".join(sorted(have)) or "none"
            raise NoPlan(
                f"{constraint.shown} wants the label {constraint.label}, which no node has (labels here: "
                f"{shown}): "
                "name one of these, or give it to a node"
            )
    for first, second in combinations(hard, 2):
        if reason := _contradiction(first, second, facts):
            raise NoPlan(
                f"{first.shown} and {second.shown} contradict each other: {reason}: drop one, or prefer it"
            )


def _contradiction(first: PlaceConstraint, second: PlaceConstraint, facts: PlaceFacts) -> str:
    shared = set(first.units) & set(second.units)
    if first.kind == second.kind == "pin":
        if shared and not any({first.label, second.label} <= labels for labels in facts.labels):
            return f"no node has both {first.label} and {second.label}"
        return ""
    kinds = {first.kind, second.kind}
    if "together" in kinds and kinds & {"apart", "spread"} and len(shared) > 1:
        together, other = (first, second) if first.kind == "together" else (second, first)
        if together.scope == "node" or other.scope == "cluster":
            return f"{len(shared)} units would be in one {together.scope} and in different {other.scope}s"
    return ""
