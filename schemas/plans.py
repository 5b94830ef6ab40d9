"""A plan that somebody asks for before there is a job: what is asked, and what the planner answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from schemas.base import Message, Part, Token
from schemas.job import JobSpec
from schemas.job_file.model import ModelSpec
from schemas.job_file.plan import PlanSpec
from schemas.job_file.training import TrainingSpec
from schemas.task_graph import LayerEdge, LayerProfile, ModelTopology, PlanForecast

MOST_LAYERS = 4096
MOST_EDGES = 16_384
Milliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]
LayerIndex = Annotated[int, Field(ge=-1, lt=MOST_LAYERS)]


class MeasuredLayer(Part):
    """One layer as measured, per microbatch; see `LayerProfile`."""

    name: str = Field(min_length=1, max_length=200)
    kind: str = Field("", max_length=200)
    parameters: Bytes = 0
    frozen: Bytes = 0
    parameter_bytes: Bytes = 0
    forward_ms: Milliseconds
    backward_ms: Milliseconds = 0.0
    activation_bytes: Bytes = 0
    input_bytes: Bytes = 0
    output_bytes: Bytes = 0


class MeasuredModel(Part):
    """A model as measured somewhere: `dmsc plan FILE --mesh` measures it here, and sends this."""

    layers: tuple[MeasuredLayer, ...] = Field(min_length=1, max_length=MOST_LAYERS)
    edges: tuple[tuple[LayerIndex, LayerIndex], ...] = Field(
        (), max_length=MOST_EDGES, description="(layer, layer that reads its output); −1: the batch"
    )
    tied: tuple[tuple[LayerIndex, ...], ...] = Field((), max_length=256, description="no cut separates them")
    input_bytes: Bytes = Field(0, description="of a microbatch")
    optimizer_bytes: float = Field(8.0, ge=0, le=1024, allow_inf_nan=False, description="per parameter")
    speed: float = Field(
        1.0, gt=0, le=1e6, allow_inf_nan=False, description="of the place where it was measured, as slots'"
    )

    @model_validator(mode="after")
    def _names_its_layers(self) -> MeasuredModel:
        count = len(self.layers)
        seen: set[str] = set()
        for layer in self.layers:
            if layer.name in seen:
                raise ValueError(f"two layers are called {layer.name}: give each its own name")
            seen.add(layer.name)
        for low, high in self.edges:
            if not low < high < count:
                raise ValueError(
                    f"edge {low} → {high}: a layer reads of earlier ones, and there are {count}: a cycle, or "
                    "another model"
                )
        if any(not 0 <= layer < count for group in self.tied for layer in group) or not all(self.tied):
            raise ValueError(f"tied names layers that are not there: there are {count}")
        return self

    @classmethod
    def of(cls, topology: ModelTopology) -> MeasuredModel:
        names = set(MeasuredLayer.model_fields)
        return cls(
            layers=tuple(
                MeasuredLayer(**{key: getattr(layer, key) for key in names}) for layer in topology.layers
            ),
            edges=tuple((edge.upstream, edge.downstream) for edge in topology.edges),
            tied=topology.tied,
            input_bytes=topology.input_bytes,
            optimizer_bytes=topology.optimizer_bytes,
            speed=topology.speed.get("stage", 1.0),
        )

    def topology(self) -> ModelTopology:
        """What an analysis would have said."""
        layers = tuple(
            LayerProfile(index=index, output=(), **layer.model_dump())
            for index, layer in enumerate(self.layers)
        )
        return ModelTopology(
            job="plan",
            cluster="plan",
            node="plan",
            layers=layers,
            edges=tuple(LayerEdge(upstream=low, downstream=high, bytes=0) for low, high in self.edges),
            parameters=sum(layer.parameters for layer in layers),
            input_bytes=self.input_bytes,
            data_tokens=0,
            code_digest="",
            tied=self.tied,
            optimizer_bytes=self.optimizer_bytes,
            speed={"stage": self.speed},
        )


class PlanBody(Part):
    """What to plan, and what to keep. The layers are those of `model`, or of a job that was analysed."""

    job: JobSpec
    model: MeasuredModel | None = Field(
        None, description="as measured; none: a node analyses the job's model, which takes some seconds"
    )
    like: Token | None = Field(None, description="a running job whose analysed model it is")
    layers: tuple[str, str] | None = Field(
        None, description="only these, by the names of the first and the last; none: all"
    )
    plan: PlanSpec | None = Field(
        None, description="instead of the job's section `plan`: constraints, shared, privacy, tabu, by"
    )
    free: bool = Field(False, description="only slots that are free now; else whoever holds them")
    best: bool = Field(
        False, description="stages and replicas as the planner chooses them, on at most `slots`"
    )
    slots: int | None = Field(None, ge=1, le=100_000, description="of the best shape; none: all that fit")

    @model_validator(mode="after")
    def _one_model(self) -> PlanBody:
        if self.model is not None and self.like is not None:
            raise ValueError("model and like both say what its layers are: give one")
        if self.slots is not None and not self.best:
            raise ValueError("slots bounds the best shape: give best: true, or leave slots out")
        return self


def planned_job(spec: JobSpec) -> JobSpec:
    """What planning reads of a job whose model is known: no data, arguments, code, weights or places."""
    training = {name: getattr(spec.training, name) for name in _PLANNED_TRAINING}
    return JobSpec(
        name=spec.name,
        model=ModelSpec(factory=spec.model.factory, dtype=spec.model.dtype, quantize=spec.model.quantize),
        training=TrainingSpec(**training),
        parallel=spec.parallel,
        requires=spec.requires,
        plan=spec.plan,
    )


_PLANNED_TRAINING = (
    "steps",
    "microbatches",
    "microbatch_samples",
    "exact_accumulation",
    "compute_threads",
    "precision",
    "recompute",
)


class MakePlan(Message, wire="plan.make"):
    """MG → SMO, after Type 3: plan this, on the slots of the mesh."""

    question: PlanBody
    user: str


class PlanPlace(Part):
    """The slot of one instance."""

    replica: int
    cluster: Token
    node: Token
    slot: int


class PlanStage(Part):
    """One stage: its layers by name and index, the last inclusive, and its instances."""

    first: str
    last: str
    first_layer: int
    last_layer: int
    replicas: int
    labels: tuple[str, ...] = ()
    places: tuple[PlanPlace, ...]


class PlanMade(Message, wire="plan.made"):
    """SMO → MG: the plan, what a step will take, why, and the best others with why not.

    `cuts` and `model`, put into a job file's section `plan`, keep it.
    """

    stages: tuple[PlanStage, ...]
    forecast: PlanForecast
    reason: str
    slots: int
    hours: float | None = Field(None, description="of all steps; null where the job has no number of them")
    price: float | None = Field(None, description="of that, where all its slots have a label `price`")
    cuts: tuple[str, ...]
    model: str
