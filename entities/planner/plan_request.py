"""What a planner is asked and what it answers: plain values, written as JSON between processes.

Imports nothing that takes time to import: the control plane asks, and only the planning process has numpy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

BY_SEARCH, BY_SIMULATION = "search", "search, judged by simulation"


class NoPlan(Exception):
    """There is no such plan: one line with what stands against it, where, and a remedy.

    `never`: nor would there be one if all slots were free. `needs_bytes`: what one instance needs that fits
    into no slot; 0: that is not why.
    """

    def __init__(self, text: str, *, never: bool = True, needs_bytes: int = 0) -> None:
        super().__init__(text)
        self.never = never
        self.needs_bytes = needs_bytes


class SearchFailed(NoPlan):
    """The search did not end, and the plan made at once won't do: there may be one all the same."""


@dataclass(frozen=True)
class PlanLayer:
    """One layer. Milliseconds and bytes per microbatch; state and sums whatever the microbatches are."""

    name: str
    work_ms: float
    """Forward and backward at speed 1."""
    state_bytes: float
    activation_bytes: float
    sums_bytes: float
    """Of its gradients' sums, as replicas exchange them."""
    output_bytes: float
    """What crosses the boundary behind it."""
    pinned_to: tuple[str, ...] = ()
    """Labels that its instances' slots must have."""


@dataclass(frozen=True)
class PlanSlot:
    """One free slot."""

    node: str
    """SID of the node's agent."""
    cluster: str
    index: int
    memory_bytes: int = 0
    """0: not known, fits all."""
    speed: float = 1.0
    labels: tuple[str, ...] = ()
    """Ascending, `key=value`."""
    host: str = ""
    """What a topology calls the node; empty: as `node`."""


RuleKind = Literal["spread", "together", "apart", "pin", "order"]
RuleScope = Literal["stage", "node", "cluster"]


@dataclass(frozen=True, kw_only=True)
class LayerRule:
    """A constraint on layers, which the stages that get them have to keep, or should.

    `apart` and `order` are between groups. The others are of all their layers: `together` of all stages that
    have some, `spread` and `pin` of each of these. What scopes mean is in `constraints`.
    """

    kind: RuleKind
    groups: tuple[tuple[int, ...], ...]
    """Indices of layers, ascending."""
    scope: RuleScope = "node"
    label: str = ""
    """Of a pin: a slot's label."""
    hard: bool = True
    name: str = ""
    """Where the user wrote it, for messages; empty: its kind."""

    @property
    def shown(self) -> str:
        return self.name or f"{self.kind} ({self.scope})"

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Of all groups, ascending."""
        return tuple(sorted({layer for group in self.groups for layer in group}))


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One job to plan."""

    layers: tuple[PlanLayer, ...]
    slots: tuple[PlanSlot, ...]
    clusters: tuple[str, ...]
    """By preference: replica r is at home in the r-th."""
    microbatches: int
    input_bytes: float = 0.0
    stages: int | None = None
    """None: the planner chooses."""
    replicas: tuple[int, ...] | None = None
    """Of each stage; None: the planner chooses."""
    standbys: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    """Where it may be cut, in front of which layers; empty: everywhere."""
    rules: tuple[LayerRule, ...] = ()
    """On places; `layer_rules.with_rules` has made those on cuts `edges`, `parted` and `pinned_to`."""
    parted: tuple[tuple[int, int, str], ...] = ()
    """Layers that no stage has both of, the lower first, and which rule says so."""
    unkept: tuple[str, ...] = ()
    """Preferred rules that no plan keeps, for the reason."""
    hosts: tuple[str, ...] = ()
    """Of the topology; empty: there is none."""
    links: tuple[tuple[str, str, float], ...] = ()
    """Of the topology: ends, and bytes per millisecond."""
    link_bytes_per_s: float = 1e9
    hop_ms: float = 1.0
    constant_ms: float = 0.0
    instance_ms: float = 0.0
    """Of a step, for each working instance, beside `constant_ms`."""
    memory_factor: float = 1.0
    most_held: int = 0
    """Microbatches whose activations must fit at once; 0: as many as windows let be held."""
    most_stages: int = 16
    least_gain: float = 0.01
    """A slot more has to make the step shorter by this part of it, where the planner chooses."""
    effort: float = 1.0
    """How long is searched, relative to the usual."""
    seed: int = 0

    @property
    def is_constrained(self) -> bool:
        """Whether there are hard rules, which slots as they come need not keep."""
        return any(rule.hard for rule in self.rules) or any(layer.pinned_to for layer in self.layers)

    def relaxed(self) -> PlanRequest:
        """The request where memory has to hold the state and one microbatch: what is certainly needed."""
        return replace(self, most_held=1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PlanRequest:
        body = json.loads(text)
        return cls(
            **{
                name: _tuples(value)
                for name, value in body.items()
                if name not in ("layers", "slots", "rules")
            },
            layers=tuple(PlanLayer(**_fields(layer)) for layer in body["layers"]),
            slots=tuple(PlanSlot(**_fields(slot)) for slot in body["slots"]),
            rules=tuple(LayerRule(**_fields(rule)) for rule in body["rules"]),
        )


@dataclass(frozen=True)
class UnitPlace:
    """Where one instance of a stage runs. `slot` counts in `PlanRequest.slots`."""

    stage: int
    replica: int
    slot: int


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The forecast of a step: milliseconds, and for each stage milliseconds and bytes of an instance."""

    step_ms: float
    bottleneck_ms: float
    fill_ms: float
    reduction_ms: float
    constant_ms: float
    stage_ms: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    busiest_link_ms: float = 0.0

    @property
    def bubble(self) -> float:
        """The part of a step in which the costliest stage has nothing to compute."""
        return 1.0 - self.bottleneck_ms / self.step_ms if self.step_ms else 0.0


@dataclass(frozen=True)
class Alternative:
    """A plan that was not chosen, in words, with its forecast and why not."""

    plan: str
    step_ms: float | None
    """None: it does not fit."""
    why_not: str


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """The plan."""

    cuts: tuple[tuple[int, int], ...]
    """(first, last) layer of each stage, the last exclusive."""
    replicas: tuple[int, ...]
    places: tuple[UnitPlace, ...]
    """Stage by stage; standbys are the replicas beyond `replicas`."""
    forecast: PlannedStep
    reason: str
    alternatives: tuple[Alternative, ...] = ()
    planned_by: str = BY_SEARCH

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PlanAnswer:
        body = json.loads(text)
        return cls(
            cuts=_tuples(body["cuts"]),
            replicas=tuple(body["replicas"]),
            places=tuple(UnitPlace(**place) for place in body["places"]),
            forecast=PlannedStep(**_fields(body["forecast"])),
            reason=body["reason"],
            alternatives=tuple(Alternative(**other) for other in body["alternatives"]),
            planned_by=body["planned_by"],
        )


def _fields(body: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in body.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
