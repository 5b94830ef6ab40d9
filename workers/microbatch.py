"""One microbatch at one instance: its states (DESIGN §5) and what it holds in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from schemas.errors import IllegalTransition
from schemas.step import Member


class MicrobatchState(StrEnum):
    IDLE = "idle"
    FORWARD_QUEUED = "forward queued"
    FORWARD_DONE = "forward done"
    BACKWARD_QUEUED = "backward queued"
    ACCUMULATED = "accumulated"


MICROBATCH_TRANSITIONS: dict[MicrobatchState, frozenset[MicrobatchState]] = {
    MicrobatchState.IDLE: frozenset({MicrobatchState.FORWARD_QUEUED}),
    # the last stage computes loss and gradient in one go, so it has no forward-done of its own
    MicrobatchState.FORWARD_QUEUED: frozenset({MicrobatchState.FORWARD_DONE, MicrobatchState.ACCUMULATED}),
    MicrobatchState.FORWARD_DONE: frozenset({MicrobatchState.BACKWARD_QUEUED}),
    MicrobatchState.BACKWARD_QUEUED: frozenset({MicrobatchState.ACCUMULATED}),
    MicrobatchState.ACCUMULATED: frozenset(),
}

HopKey = tuple[int, int, bool]
"""(step, microbatch, evaluate)."""


@dataclass(slots=True)
class Hop:
    """A microbatch on its way through this instance, in one attempt.

    `inputs` are what came from upstream: activations, then the targets that travel along.
    `outputs` are this stage's activations with their autograd graph, until the backward pass.
    `sent_forward` and `sent_backward` are retained until the step is committed, so that a broken link
    can be offered them again (DESIGN §5 rule 3).
    """

    step: int
    microbatch: int
    attempt: int
    evaluate: bool
    upstream: Member
    state: MicrobatchState = MicrobatchState.IDLE
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    downstream: Member | None = None
    sent_forward: tuple[Tensor, ...] = ()
    sent_backward: tuple[Tensor, ...] = ()
    loss: float | None = None
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    history: list[str] = field(default_factory=list)

    @property
    def key(self) -> HopKey:
        return (self.step, self.microbatch, self.evaluate)

    @property
    def retained_bytes(self) -> int:
        kept = (*self.sent_forward, *self.sent_backward)
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def advance(self, state: MicrobatchState) -> None:
        """Moves on, or raises `IllegalTransition` with the history of this microbatch."""
        if state not in MICROBATCH_TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"microbatch {self.microbatch} of step {self.step}: {self.state} → {state} "
                f"(history: {', '.join(self.history) or 'none'})"
            )
        self.history.append(self.state)
        self.state = state
