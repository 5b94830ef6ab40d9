"""An orchestrator in virtual time: the real step machine, and what each of its effects has instances do.

`SimulatedJob` (`dmsc simulate`) and the leaders of `tests/sim` differ in how an order travels: in
`SimulatedJob` after a delay and never lost, in `tests/sim` on a bus that drops, repeats and delays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from entities.orchestrator.transaction import step_events as ev
from entities.orchestrator.transaction.step_machine import StepMachine
from schemas.step import Member

Answers = dict[Member, Any]


class SimulatedLeader(ABC):
    """Carries out a step machine's effects, and brings the answers back to it as events."""

    machine: StepMachine

    @abstractmethod
    def event(self, event: ev.Event) -> None:
        """Let the machine decide, and carry out its effects."""

    @abstractmethod
    def order(
        self,
        effect: ev.Effect,
        members: Sequence[Member],
        obey: Callable[[Any], Any],
        done: Callable[[Answers], None],
        *,
        skip_lost: bool = False,
    ) -> None:
        """Have members obey.

        Args:
            effect: The effect that asks for it.
            members: Who is to obey.
            obey: What an instance does; None: it can't yet.
            done: Gets all answers, when all have answered. It is never called if one of them is lost.
            skip_lost: Whether those who are lost need not answer.
        """

    def execute(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Fence():
                self.order(
                    effect,
                    effect.targets,
                    lambda instance: instance.fence(effect),
                    lambda answers: self.event(ev.FenceAcknowledged(effect.round, tuple(answers.values()))),
                )
            case ev.Assign():
                self.order(
                    effect,
                    tuple(effect.paths),
                    lambda instance: instance.assign(effect),
                    lambda answers: self.event(ev.Assigned(effect.round)),
                )
            case ev.FormGroup():
                self.order(
                    effect,
                    effect.members,
                    lambda instance: instance.form(effect),
                    lambda answers: self.formed(effect),
                )
            case ev.Commit(decision):
                members = tuple(member for stage in decision.membership for member in stage)
                self.order(
                    effect,
                    members,
                    lambda instance: instance.commit(decision),
                    lambda answers: self.event(
                        ev.Committed(
                            decision.step, tuple(member for member in members if member not in answers)
                        )
                    ),
                    skip_lost=True,
                )
            case ev.Restart():
                self.order(
                    effect,
                    effect.targets,
                    lambda instance: instance.restart(effect),
                    lambda answers: self.event(ev.Restarted(effect.attempt)),
                    skip_lost=True,
                )
            case _:
                self.carry_out(effect)

    def formed(self, effect: ev.FormGroup) -> None:
        """All members of a stage stand together."""
        self.event(ev.ReductionGroupFormed(effect.stage, effect.generation))

    @abstractmethod
    def carry_out(self, effect: ev.Effect) -> None:
        """Carry out an effect that is not an order with one answer of each member."""
