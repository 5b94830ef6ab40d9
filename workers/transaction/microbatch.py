"""One microbatch at one instance: its states (DESIGN §5) and the tensors it holds in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schemas.errors import IllegalTransition
from schemas.step import MICROBATCH_TRANSITIONS, Member, MicrobatchState

if TYPE_CHECKING:
    from torch import Tensor  # the simulator runs the machines without torch

HopKey = tuple[int, int, bool]
"""(step, microbatch, evaluate)."""


@dataclass(slots=True)
class Hop:
    """A microbatch on its way through this instance, in one attempt.

    `inputs` came from upstream: activations, then what of the batch travels along; `carried` are those of
    them that get a gradient. `statistics` are what it adds to running averages.
    `outputs` are this stage's activations with their autograd graph, until the backward pass.
    `sent_forward` and `sent_backward` are retained until the step is committed, so that they can be offered
    to a neighbour that replaces a lost one (DESIGN §5 rule 3). An `idle` hop was assigned by the orchestrator
    and its inputs have not arrived; `returned` is its gradient if that came first, and `offer` says whether
    its downstream still needs its output. `replaced` counts its samples in the place of unreadable ones.
    """

    step: int
    microbatch: int
    attempt: int
    evaluate: bool
    upstream: Member
    state: MicrobatchState = MicrobatchState.IDLE
    inputs: tuple[Tensor, ...] = ()
    carried: tuple[Tensor, ...] = ()
    statistics: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    downstream: Member | None = None
    offer: bool = True
    returned: tuple[Tensor, ...] | None = None
    sent_forward: tuple[Tensor, ...] = ()
    sent_backward: tuple[Tensor, ...] = ()
    loss: float | None = None
    weight: float = 1.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    measured: bool = False
    replaced: int = 0
    history: list[str] = field(default_factory=list)

    @property
    def key(self) -> HopKey:
        return (self.step, self.microbatch, self.evaluate)

    @property
    def retained_bytes(self) -> int:
        retained = (*self.sent_forward, *self.sent_backward)
        return sum(tensor.nbytes for tensor in retained)

    def advance(self, state: MicrobatchState) -> None:
        """Changes the state, or raises `IllegalTransition` with the history of this microbatch."""
        before = self.state
        if state not in MICROBATCH_TRANSITIONS[before]:
            raise IllegalTransition(
                f"microbatch {self.microbatch} of step {self.step}: {before} → {state} "
                f"(history: {', '.join(self.history) or 'none'})"
            )
        self.history.append(before)
        self.state = state
