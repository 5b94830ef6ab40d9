"""What a planner is asked and what it answers: plain values, written as JSON between processes.

Imports nothing that takes time to import: the control plane asks, and only the planning process has numpy.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

BY_SEARCH = "search"


class NoPlan(Exception):
    """There is no such plan: one line with what stands against it, where, and a remedy.

    `never`: nor would there be one if all slots were free. `needs_bytes`: what one instance needs that fits
    into no slot; 0: that is not why.
    """

    def __init__(self, text: str, *, never: bool = True, needs_bytes: int = 0) -> None:
        super().__init__(text)
        self.never = never
        self.needs_bytes = needs_bytes


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


@dataclass(frozen=True, kw_only=True)
class PlacementWish:
    """A constraint on stages, as a job names it. `kind` and `scope` as of `constraints.PlaceConstraint`."""

    kind: Literal["spread", "together", "apart", "pin"]
    stages: tuple[int, ...]
    scope: Literal["node", "cluster"] = "node"
    label: str = ""
    hard: bool = False
    name: str = ""


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
    wishes: tuple[PlacementWish, ...] = ()
    hosts: tuple[str, ...] = ()
    """Of the topology; empty: there is none."""
    links: tuple[tuple[str, str, float], ...] = ()
    """Of the topology: ends, and bytes per millisecond."""
    link_bytes_per_s: float = 1e9
    hop_ms: float = 1.0
    constant_ms: float = 0.0
    memory_factor: float = 1.0
    most_held: int = 0
    """Microbatches whose activations must fit at once; 0: as many as windows let be held."""
    most_stages: int = 16
    least_gain: float = 0.01
    """A slot more has to make the step shorter by this part of it, where the planner chooses."""
    effort: float = 1.0
    """How long is searched, relative to the usual."""
    seed: int = 0

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
                if name not in ("layers", "slots", "wishes")
            },
            layers=tuple(PlanLayer(**_fields(layer)) for layer in body["layers"]),
            slots=tuple(PlanSlot(**_fields(slot)) for slot in body["slots"]),
            wishes=tuple(PlacementWish(**_fields(wish)) for wish in body["wishes"]),
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
    step_ms: float
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
