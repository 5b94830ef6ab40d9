"""`change-outcomes` with the weights with which its training begins: what learning is compared with."""

from __future__ import annotations

from typing import ClassVar

from policies.built_in.change_outcomes import ChangeOutcomes
from policies.numerics.allocation.outcome_network import untrained


class UntrainedOutcomes(ChangeOutcomes):
    """The same module, thresholds and features; the network has learnt nothing."""

    name: ClassVar[str] = "untrained-outcomes"

    def __init__(self) -> None:
        super().__init__(network=untrained())
