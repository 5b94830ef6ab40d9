"""Balancers by the name of their algorithm: built in, or a user's `module:factory`."""

from __future__ import annotations

from collections.abc import Callable

from schemas.callables import BALANCERS, FORMER_BALANCERS
from schemas.errors import BadModel
from workers.routing.balancers import Balancer, LeastOutstanding, PowerOfTwo, RoundRobin, WeightedServiceTime
from workers.routing.expected_completion import ExpectedCompletion
from workers.user_code import load

BUILT_IN: dict[str, Callable[[int], Balancer]] = {
    "expected-completion": ExpectedCompletion,
    "weighted-service-time": WeightedServiceTime,
    "power-of-two": PowerOfTwo,
    "least-outstanding": LeastOutstanding,
    "round-robin": RoundRobin,
}
"""Name → factory, which takes a seed."""


def balancer(algorithm: str, seed: int = 0) -> Balancer:
    """A balancer of the named algorithm, built in or made by `module:factory`.

    Raises:
        BadModel: No algorithm has this name, or user code can't be imported or called.
    """
    if algorithm in BUILT_IN:
        return BUILT_IN[algorithm](seed)
    if ":" not in algorithm:
        names = ", ".join(BUILT_IN)
        raise BadModel(f"routing.algorithm {algorithm!r} is none of {names}, nor module:factory")
    try:
        custom: Balancer = load(algorithm, BALANCERS | FORMER_BALANCERS)(seed)
    except BadModel as error:
        raise BadModel(f"routing.algorithm {error.text}") from error
    except Exception as error:  # user code may raise anything
        raise BadModel(f"routing.algorithm {algorithm}: {type(error).__name__}: {error}") from error
    return custom
