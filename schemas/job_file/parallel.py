"""The section `parallel`: how many stages and replicas, and where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from schemas.base import Part, Token
from schemas.job_file.training import Synchronous

MOST_INSTANCES = 100_000
"""Most instances of a job, including standbys."""
Replicas = Annotated[int, Field(ge=1, le=MOST_INSTANCES)]
Standbys = Annotated[int, Field(ge=0, le=MOST_INSTANCES)]


class ParallelSpec(Part):
    """How the model is cut into stages and replicated. `replicas` is one number or one per stage."""

    stages: int = Field(1, ge=1, le=1024, description="parts that the model is cut into")
    replicas: Replicas | tuple[Replicas, ...] = Field(
        1, description="instances of each stage: one number, or one per stage"
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
    asynchronous: Synchronous = Field(False, description="refused: weights would depend on who was fast")

    @model_validator(mode="after")
    def _shape(self) -> ParallelSpec:
        counts = self.replicas_per_stage()
        if len(counts) != self.stages:
            raise ValueError(f"replicas names {len(counts)} stages, but stages is {self.stages}")
        standbys = self.standbys_per_stage()
        if len(standbys) != self.stages:
            raise ValueError(f"standbys names {len(standbys)} stages, but stages is {self.stages}")
        if (total := sum(counts) + sum(standbys)) > MOST_INSTANCES:
            raise ValueError(f"{total} replicas and standbys in all; give at most {MOST_INSTANCES}")
        return self

    def standbys_per_stage(self) -> tuple[int, ...]:
        if isinstance(self.standbys, int):
            return (self.standbys,) * self.stages
        return self.standbys

    def replicas_per_stage(self) -> tuple[int, ...]:
        if isinstance(self.replicas, int):
            return (self.replicas,) * self.stages
        return self.replicas
