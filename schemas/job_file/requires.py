"""The section `requires`: what a place must be able to do to run a stage of the job."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Part, Token
from schemas.registry import Labels


class RequiresSpec(Part):
    """What each slot of the job must have. Clusters are named in `parallel.clusters`."""

    device: Token | None = Field(None, description="kind of device: cpu, cuda, …; none: any")
    count: int = Field(
        0, ge=0, le=100_000, description="how many such slots the mesh must have at least; 0: what it places"
    )
    precision: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="in which the device computes without emulation; none: any"
    )
    labels: Labels = Field({}, description="what operators must have said of its node: {region: eu}")
    bits: Literal["same", "any"] = Field(
        "same",
        description="whether all its devices, for as long as it lives, are of one class that computes the "
        "same bits",
    )
