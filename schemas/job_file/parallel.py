"""The section `parallel`: how many stages and replicas, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from schemas.base import Part, Token
from schemas.job_file.training import Synchronous, or_words

MOST_INSTANCES = 100_000
"""Most instances of a job, including standbys."""
MOST_STAGES = 1024
MOST_RANGE = 256
"""Numbers of replicas in a range: a step is forecast with each of them, and the job's record has them all."""
Replicas = Annotated[int, Field(ge=1, le=MOST_INSTANCES)]
Standbys = Annotated[int, Field(ge=0, le=MOST_INSTANCES)]


class ReplicaRange(Part):
    """How many replicas a job may have: the queue starts it with `min` to `want`, and gives it up to `max`.

    The weights' bits do not depend on it. Each replica has an instance of every stage.
    """

    min: Annotated[int, Field(ge=0, le=MOST_INSTANCES)] = Field(
        1,
        description="so many are enough to start; to so many it shrinks for a waiting job; 0: a service "
        "gives its slots back while nobody asks it",
    )
    want: Replicas = Field(description="best; the job counts with these, in quotas and forecasts")
    max: Replicas = Field(
        default_factory=lambda given: given.get("want", 1),
        description="with so many it may use slots that nobody waits for; by default `want`",
    )

    @model_validator(mode="after")
    def _in_order(self) -> ReplicaRange:
        if not self.min <= self.want <= self.max:
            raise ValueError(f"min {self.min}, want {self.want}, max {self.max}: give min ≤ want ≤ max")
        if (count := self.max - self.least + 1) > MOST_RANGE:
            raise ValueError(
                f"min {self.min} to max {self.max} are {count:,} numbers of replicas: give at most "
                f"{MOST_RANGE}"
            )
        return self

    @property
    def least(self) -> int:
        """The fewest replicas with which it runs."""
        return max(1, self.min)

    def around(self, want: int) -> ReplicaRange:
        """The range with another `want`, wider where it has to be.

        Raises:
            ValidationError: it would be too wide.
        """
        return ReplicaRange(min=min(self.min, want), want=want, max=max(self.max, want))


def _form(value: Any) -> str:
    """Which form of `replicas` a value is to be, so that an error is one line and not one for each form."""
    if isinstance(value, Mapping | ReplicaRange):
        return "ReplicaRange"
    return "list" if isinstance(value, list | tuple) else "number"


AskedReplicas = Annotated[
    Annotated[Replicas, Tag("number")]
    | Annotated[tuple[Replicas, ...], Tag("list")]
    | Annotated[ReplicaRange, Tag("ReplicaRange")],
    Discriminator(_form),
]


class ParallelSpec(Part):
    """How the model is cut into stages and replicated.

    `replicas` is one number, one per stage, or a range within which the queue chooses.
    """

    stages: int = Field(
        1,
        ge=1,
        le=MOST_STAGES,
        json_schema_extra=or_words("auto"),
        description="parts that the model is cut into; auto: the planner chooses them, and the replicas",
    )
    replicas: AskedReplicas = Field(
        1,
        json_schema_extra=or_words("auto"),
        description="instances of each stage: one number, one per stage, or {min, want, max} within which "
        "the queue chooses; auto: the planner chooses them",
    )
    slots: int | None = Field(
        None, ge=1, le=MOST_INSTANCES, description="that the planner may use, with stages or replicas: auto"
    )
    standbys: Standbys | tuple[Standbys, ...] = Field(
        0,
        description="replicas that only keep up, one number or one per stage",
    )
    copies: bool = Field(
        False,
        description="a stage with one replica and no standby keeps a copy of its state at a peer",
    )
    rebalance: bool = Field(
        True,
        description="whether a policy may have an instance change its stage; `replicas` is then what the "
        "job begins with",
    )
    clusters: tuple[Token, ...] = Field((), description="clusters where it may run; none: any")
    segmentation: Literal["measured", "uniform"] = Field(
        "measured", description="cuts by measured cost, or by equal numbers of layers"
    )
    auto: tuple[Literal["stages", "replicas"], ...] = Field(
        (), description="which of these keys say `auto`, until they are chosen: when the model is analysed"
    )
    asynchronous: Synchronous = Field(False, description="refused: weights would depend on who was fast")

    @model_validator(mode="before")
    @classmethod
    def _words_for_numbers(cls, value: Any) -> Any:
        """`auto`: until the planner has chosen, the job counts as many instances as it may get slots."""
        if not isinstance(value, Mapping):
            return value
        given = dict(value)
        words = [key for key in ("stages", "replicas") if given.get(key) == "auto"]
        slots = given.get("slots")
        if not words:
            return given
        if not isinstance(slots, int) or not 1 <= slots <= MOST_INSTANCES:
            raise ValueError(
                f"{words[0]}: auto needs slots, the most that the job may use: a number from 1 on"
            )
        if given.get("standbys", 0) != 0:
            raise ValueError(
                f"{words[0]}: auto chooses no standbys: leave standbys out, or give numbers of both"
            )
        if "stages" in words:
            if given.get("replicas", "auto") != "auto":
                raise ValueError("stages: auto chooses the replicas, too: leave replicas out")
            return given | {"stages": 1, "replicas": slots, "auto": ("stages", "replicas")}
        stages = given.get("stages", 1)
        if not isinstance(stages, int) or not 1 <= stages <= MOST_STAGES:
            return given | {"replicas": 1}  # whatever is wrong with it is said there
        if slots < stages:
            raise ValueError(f"slots: {slots} are too few for {stages} stages: give at least {stages}")
        equal = tuple((at + 1) * slots // stages - at * slots // stages for at in range(stages))
        return given | {"replicas": equal, "auto": ("replicas",)}

    @model_validator(mode="after")
    def _shape(self) -> ParallelSpec:
        if self.slots is not None and not self.auto:
            raise ValueError(
                "slots says how many the planner may use with stages or replicas: auto; leave it out"
            )
        counts = self.replicas_per_stage()
        if len(counts) != self.stages:
            raise ValueError(f"replicas names {len(counts)} stages, but stages is {self.stages}")
        standbys = self.standbys_per_stage()
        if len(standbys) != self.stages:
            raise ValueError(f"standbys names {len(standbys)} stages, but stages is {self.stages}")
        most = sum(counts) if self.replica_range is None else self.stages * self.replica_range.max
        if (total := most + sum(standbys)) > MOST_INSTANCES:
            raise ValueError(f"{total} replicas and standbys in all; give at most {MOST_INSTANCES}")
        return self

    def standbys_per_stage(self) -> tuple[int, ...]:
        if isinstance(self.standbys, int):
            return (self.standbys,) * self.stages
        return self.standbys

    def replicas_per_stage(self) -> tuple[int, ...]:
        """Of each stage; of a range, what the job wants."""
        if isinstance(self.replicas, tuple):
            return self.replicas
        return (self.replicas if isinstance(self.replicas, int) else self.replicas.want,) * self.stages

    @property
    def replica_range(self) -> ReplicaRange | None:
        """Within which the queue chooses the number of replicas; None: the job says how many."""
        return self.replicas if isinstance(self.replicas, ReplicaRange) else None

    def with_replicas(self, replicas: int) -> ParallelSpec:
        """The same with so many replicas of each stage; a range stays one around that number."""
        within = self.replica_range
        return self.model_copy(update={"replicas": replicas if within is None else within.around(replicas)})
