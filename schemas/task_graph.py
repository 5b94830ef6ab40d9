"""Decomposition (draft §4.5, §5.3): the analysed model, the task graph, and its placement."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.registry import TensorSchema


class LayerProfile(Part):
    """One top-level layer, as measured once by an analysis worker on one sample microbatch.

    Times are milliseconds per microbatch on one compute thread; sizes are bytes.
    `output_bytes` is the size per microbatch of the tensors at the boundary after this layer. `shared` are
    the trained parameters that other layers use, too: full name → number.
    """

    index: int
    name: str
    kind: str
    parameters: int
    frozen: int = Field(0, description="of the parameters, those that are not trained")
    shared: dict[str, int] = {}
    parameter_bytes: int
    forward_ms: float
    backward_ms: float
    activation_bytes: int
    input_bytes: int = Field(
        0, description="what it reads: all that it keeps where it is computed again; 0: it can't be"
    )
    output: tuple[TensorSchema, ...]
    output_bytes: int


class LayerEdge(Part):
    """What one layer hands to another, bytes per microbatch; `upstream` −1: of the batch."""

    upstream: int = Field(ge=-1)
    downstream: int
    bytes: int


class DataSource(Part):
    """One source that a job is trained on. `epoch_samples`: None for windows from anywhere and for feeds."""

    name: str = Field(description="its place in the job file, or the feed")
    epoch_samples: int | None = None
    feed: str = Field("", description="of a feed whose records are taken as they arrive, its `uid`")

    def epochs(self, samples: int) -> float | None:
        """How often each of its samples was seen, if so many were taken of it."""
        return samples / self.epoch_samples if self.epoch_samples else None


class ModelTopology(Message, wire="topology.model", version=(1, 5)):
    """MIC → SMO (§5.3): the job's layer graph with costs, and facts about its data."""

    job: Token
    cluster: Token
    node: Token
    layers: tuple[LayerProfile, ...]
    edges: tuple[LayerEdge, ...] = Field(
        (),
        description="which layers read what others gave, in order; what many read counts for each",
    )
    parameters: int
    input_bytes: int = Field(description="tokens and targets of one microbatch, bytes")
    data_tokens: int
    code_digest: str = Field(description="SHA-256 of the user code's source files; nodes must agree")
    data_digest: str = Field("", description="SHA-256 of what identifies the data; data instances must agree")
    device: str = "cpu"
    speed: dict[str, float] = Field(
        {}, description="of the place where the layers were timed, as of `Capability`; empty: not known"
    )
    tied: tuple[tuple[int, ...], ...] = Field((), description="groups of layers that no cut may separate")
    shared: tuple[tuple[int, ...], ...] = Field((), description="groups of layers that share a parameter")
    inexact: str = Field("", description="what of the model has no deterministic form; empty: nothing")
    batch: tuple[TensorSchema, ...] = Field((), description="what model and loss take of a batch, in order")
    records: tuple[tuple[TensorSchema, ...], ...] = Field(
        (), description="what each function of data.preprocess takes of a sample, in order of the chain"
    )
    sources: tuple[DataSource, ...] = Field((), description="what it is trained on, in order")
    epoch_samples: int = Field(0, description="of an epoch of the data; 0: windows from anywhere")
    optimizer_bytes: float = Field(
        8.0, description="of optimizer state and averages per trained parameter, as tried"
    )
    unmatched_weights: str = Field(
        "",
        description="what the files of initial_weights lack, and what of them nothing takes; empty: nothing",
    )
    compiler: str = Field(
        "", description="digest of what compiled layers' bits depend on; empty: there are none"
    )
    auto: tuple[str, ...] = Field((), description="what of the job was not fixed yet (`training.auto`)")


class TopologyReleased(Message, wire="topology.released"):
    """MIC → SMO (§4.4(6)): the topology of an ended job was dropped."""

    job: Token
    cluster: Token
    node: Token


class UnitKind(StrEnum):
    DATA = "data"
    PREPROCESS = "preprocess"
    STAGE = "stage"


ENTRY = -1
"""The stage number of the units that hand batches to stage 0, and that gateways dispatch to: data units, or
the last function of `data.preprocess`. The functions before it have the numbers before it, and then come the
data units: what is before the entry is asked for, is no part of the step transaction, and has no state."""


def is_data(stage: int) -> bool:
    """Whether a stage number is that of units that make batches, which come before stage 0."""
    return stage < 0


def is_before_entry(stage: int) -> bool:
    """Whether the units of a stage number only answer those of the next one (ADR-0062)."""
    return stage < ENTRY


class ComputeRequirements(Part):
    """A unit's requirements for its slot. Bytes; FLOP-equivalent milliseconds per microbatch.

    `measured_speed` is that of the place where `cost_ms` was measured (`Capability.speed`, kind `stage`).
    """

    memory_bytes: int = 0
    cost_ms: float = 0.0
    measured_speed: float = Field(1.0, gt=0)
    device: str = "any"
    compute_threads: int = 1
    labels: tuple[str, ...] = Field(
        (), description="of its slot: `key=value`, `@node=NAME`, `@cluster=NAME`, `@memory=BYTES` at least"
    )

    @property
    def reference_ms(self) -> float:
        """What a microbatch takes on a device of speed 1."""
        return self.cost_ms * self.measured_speed


class TaskUnit(Part):
    """One node of the task graph: a microservice unit with its metadata (draft §4.5(2)).

    `stage` is below 0 for units that make batches (`ENTRY`); `first_layer`..`last_layer` (exclusive) is the
    slice of the model.
    """

    sid: Token
    kind: UnitKind
    stage: int
    replica: int
    first_layer: int = 0
    last_layer: int = 0
    input_schema: tuple[TensorSchema, ...] = ()
    output_schema: tuple[TensorSchema, ...] = ()
    requirements: ComputeRequirements = ComputeRequirements()
    tags: tuple[str, ...] = ()
    standby: bool = Field(False, description="holds the stage's state, and works when no other replica lives")
    name: str = Field("", description="of a function of data.preprocess")

    @property
    def is_data(self) -> bool:
        """Whether it makes batches: it has no layers, and takes no slot."""
        return is_data(self.stage)

    @property
    def scaled_as(self) -> str:
        """What `dmsc scale --unit` calls those that make batches; empty: a stage's."""
        return self.name or ("data" if self.kind is UnitKind.DATA else "")

    @property
    def part(self) -> str:
        """Its part of the job, the end of its content name: `data`, `preprocess/NAME`, `stage/N`."""
        if self.kind is UnitKind.STAGE:
            return f"stage/{self.stage}"
        return f"{self.kind}/{self.name}" if self.name else str(self.kind)


class TaskEdge(Part):
    """Communication between two stages: bytes per microbatch, forward (backward is as large)."""

    upstream: int
    downstream: int
    bytes_per_microbatch: int


class Constraint(Part):
    """A constraint on units: `spread`, `apart`: different places; `together`: one; `order`: first before
    second.

    What the job's owner says of layers holds for `stages`, whatever instances they have by now.
    """

    kind: str
    sids: tuple[Token, ...]
    reason: str = ""
    scope: str = Field("", description="`node` or `cluster`: of what places it speaks")
    stages: tuple[tuple[int, ...], ...] = Field((), description="of an owner's rule: its stages, by group")
    label: str = Field("", description="of a pin that is preferred")
    hard: bool = False


class Placement(Part):
    """The place of one unit."""

    sid: Token
    cluster: Token
    node: Token
    slot: int
    device: str


class PlanAlternative(Part):
    """A plan that was not chosen: in words, its step in milliseconds, and why not."""

    plan: str
    step_ms: float | None = Field(description="null: it does not fit")
    why_not: str


class PlanForecast(Part):
    """What the planner expects of a step, in milliseconds, and of what it consists (ADR-0070).

    `stage_ms` and `memory_bytes` are of each stage: its part of a step, and the need of one instance.
    """

    step_ms: float
    bottleneck_ms: float = Field(description="of the costliest stage, for all microbatches")
    fill_ms: float = Field(
        description="a microbatch through the other stages, and what instances wait for each other"
    )
    reduction_ms: float
    constant_ms: float
    stage_ms: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    busiest_link_ms: float = Field(0.0, description="of a topology, for a step; 0: there is none")
    planned_by: str = ""
    alternatives: tuple[PlanAlternative, ...] = ()
    by_replicas: tuple[float, ...] = Field(
        (), description="a step with min, …, max replicas, where the job gives that range"
    )


class TaskGraph(Part):
    """Units, edges, constraints, and the placement that the orchestrator chose, with its reason.

    `revision` grows with each deployment and each re-cut of the job: instances of different ones have other
    layers.
    """

    revision: int = 0
    units: tuple[TaskUnit, ...]
    edges: tuple[TaskEdge, ...]
    constraints: tuple[Constraint, ...] = ()
    placements: tuple[Placement, ...] = ()
    reason: str = ""
    code_digest: str = Field("", description="of the user code, as analysed; instances check their own")
    data_digest: str = Field("", description="of the data, as analysed; data instances check their own")
    inexact: str = Field("", description="what of the model has no deterministic form; empty: nothing")
    compiler: str = Field("", description="as analysed; instances check their own")
    layer_count: int = 0
    parameters: int = Field(0, description="of the whole model; 0: not known")
    batch: tuple[TensorSchema, ...] = Field(
        (), description="what travels of a batch, in order; empty: inputs and targets, tokens both"
    )
    sources: tuple[DataSource, ...] = ()
    tied_stages: tuple[tuple[int, ...], ...] = Field(
        (), description="groups of stages that share a parameter: they prepare together"
    )

    distances: dict[Token, dict[Token, int]] = Field(
        {}, description="links between clusters, by the mesh's topology file; empty: there is none"
    )
    forecast: PlanForecast | None = Field(None, description="as planned; changes of replicas leave it")
    facts_digest: str = Field(
        "", description="of what its slots could do when it was planned; empty: an older orchestrator's plan"
    )

    def unit(self, sid: str) -> TaskUnit:
        return next(unit for unit in self.units if unit.sid == sid)

    def placement(self, sid: str) -> Placement:
        return next(place for place in self.placements if place.sid == sid)

    def layers(self, stage: int) -> tuple[int, int]:
        """(first, last) layer of a stage, the last exclusive."""
        unit = self.stage(stage)[0]
        return unit.first_layer, unit.last_layer

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """(first, last) layer of each stage."""
        stages = 1 + max(unit.stage for unit in self.units)
        return tuple(self.layers(stage) for stage in range(stages))

    def stage(self, stage: int) -> tuple[TaskUnit, ...]:
        return tuple(unit for unit in self.units if unit.stage == stage)


def slot_in_words(cluster: str, node: str, slot: int) -> str:
    """A slot, for people."""
    return f"slot {slot} of {cluster}/{node}"


class JobTopology(Message, wire="topology.graph"):
    """The present dependency topology of a job, for functional modules (draft §4.2)."""

    job: Token
    epoch: int
    graph: TaskGraph
