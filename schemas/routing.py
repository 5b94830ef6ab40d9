"""How a job's microbatches are distributed over the instances of a stage."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from schemas.base import Part
from schemas.callables import BALANCERS, FORMER_BALANCERS, misnamed

DEFAULT_ALGORITHM = "expected-completion"

MEASURING = ("expected-completion", "weighted-service-time", "power-of-two")
"""These use measured service times themselves: weights for the same purpose would count them twice."""

ALGORITHMS = (*MEASURING, "least-outstanding", "round-robin")


def _known(value: str) -> str:
    module, _, factory = value.partition(":")
    own = all(part.isidentifier() for part in module.split(".")) and factory.isidentifier()
    if value not in ALGORITHMS and not own:
        raise ValueError(f"must be one of {', '.join(ALGORITHMS)}, or module:factory")
    known = value in ALGORITHMS or value in FORMER_BALANCERS
    if not known and (reason := misnamed(value, BALANCERS)):
        raise ValueError(reason)
    return value


Algorithm = Annotated[str, AfterValidator(_known)]


class RoutingSpec(Part):
    """The routing of a job.

    `algorithm` is a built-in one, or a `module:factory` that is importable on every node of the job; the
    factory takes a seed and returns a `workers.routing.balancers.Balancer`.
    """

    algorithm: Algorithm = Field(
        DEFAULT_ALGORITHM, description=f"{', '.join(ALGORITHMS)}, or `module:factory`"
    )
