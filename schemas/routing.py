"""How a job's microbatches are spread over the instances of a stage."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from schemas.base import Part
from schemas.callables import BALANCERS, FORMER_BALANCERS, misnamed

DEFAULT_ALGORITHM = "expected-completion"

MEASURING = ("expected-completion", "weighted-service-time", "power-of-two")
"""These draw on measured service times by themselves: weights for the same end would count them twice."""

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
    """`algorithm`: one of `ALGORITHMS`, or `module:factory`, importable on every node that runs the job; the
    factory takes a seed and returns a `workers.routing.balancers.Balancer`."""

    algorithm: Algorithm = DEFAULT_ALGORITHM
