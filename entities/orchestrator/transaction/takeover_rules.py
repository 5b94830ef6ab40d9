"""What a new orchestrator makes of a running job (DESIGN §5 rule 7). Pure.

It has written its epoch into the decision record, so that no other can decide any more, and has asked all
instances where they are; their answers promise to refuse lower epochs. What the record says was decided is
committed again where it was not applied yet; the step after it is begun again by a new attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.step import Adopted, Member, StepDecision


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Where the job goes on. `recommit`: those that have prepared the decided step and not applied it.

    `generation` is above any that an instance has seen, `attempt` too.
    """

    step: int
    attempt: int
    generation: int
    stages: Sequence[Sequence[Member]]
    data: Sequence[Member]
    recommit: tuple[Member, ...] = ()

    @property
    def everyone(self) -> tuple[Member, ...]:
        return (*(member for members in self.stages for member in members), *self.data)


def settle(
    decision: StepDecision | None,
    answers: Sequence[Adopted],
    roles: Mapping[Member, int],
    stages: int,
    epoch: int,
) -> Settled:
    """Who goes on, and where.

    Args:
        decision: the last one in the record; None before the first.
        answers: of all instances that answered; others are lost to the job.
        roles: stage of each instance, −1 for data instances.
        stages: number of stages.
        epoch: the new one.

    A stage instance goes on if it is at the step after the decision, or can get there: it is at the decided
    step and has that prepared (where the step is left out, there is nothing to prepare: it is among those
    that the decision names), or nothing was decided yet. A newcomer that was about to join is none of
    these, and is left to be replaced.
    """
    step = 0 if decision is None else decision.step + 1
    crew: list[list[Member]] = [[] for _ in range(stages)]
    recommit = []
    for answer in sorted(answers, key=lambda answer: answer.member.sid):
        stage = roles[answer.member]
        if stage < 0:
            continue
        if answer.version == step:
            crew[stage].append(answer.member)
        elif decision is not None and _can_follow(answer, decision, stage):
            crew[stage].append(answer.member)
            recommit.append(answer.member)
    return Settled(
        step=step,
        attempt=1 + max((answer.attempt for answer in answers), default=0),
        generation=1 + max((answer.generation for answer in answers), default=0),
        stages=tuple(tuple(members) for members in crew),
        data=tuple(answer.member for answer in answers if roles[answer.member] < 0),
        recommit=tuple(recommit),
    )


def outsiders(known: Iterable[Member], settled: Settled) -> tuple[Member, ...]:
    """Those of `known` that do not go on: the dead, and newcomers that had not joined yet.

    Everybody else is told to fence them: a state on its way to one of them would hold up the next commit.
    """
    return tuple(sorted(set(known) - set(settled.everyone), key=lambda one: (one.sid, one.incarnation)))


def _can_follow(answer: Adopted, decision: StepDecision, stage: int) -> bool:
    """It is at the decided step, and can apply the decision."""
    if answer.version != decision.step:
        return False
    if decision.quarantined:
        return answer.attempt == decision.attempt and answer.member in decision.membership[stage]
    return answer.prepared == decision.step
