"""An operation as a value: what the bearer must be permitted to do, and the function that then does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemas.signals import AccessDecision

Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Operation(Generic[Result_co]):
    """Permitted as `action` on `resource` (Type 3), then carried out by `act`, which gets the decision.

    `frees`: it frees resources and may be carried out twice. So it is sent although the entity's breaker is
    open, and although the bus can't store its answer for a repetition.
    """

    action: str
    resource: str
    act: Callable[[AccessDecision], Awaitable[Result_co]]
    frees: bool = False
