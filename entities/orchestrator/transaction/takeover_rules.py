"""Where a new orchestrator goes on with a running job (DESIGN §5 rule 7). Pure.

The new orchestrator has written its epoch into the decision record, so that no other can decide any more, and
has asked all instances where they are; their answers promise to refuse lower epochs. The recorded decision is
committed again where it was not applied yet; the step after it begins again with a new attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.step import Adopted, Member, StepDecision
from schemas.task_graph import is_data


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where the job goes on. `recommit`: members that have prepared the decided step but not applied it.

    `generation` and `attempt` are above any that an instance has seen.
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


def find_resume_point(
    decision: StepDecision | None,
    answers: Sequence[Adopted],
    roles: Mapping[Member, int],
    stages: int,
) -> ResumePoint:
    """Who goes on, and where.

    A stage instance goes on if it is at the step after the decision, or can get there: it is at the decided
    step and has prepared it. Where the step is left out there is nothing to prepare; then the decision must
    name the instance. Before the first decision, an instance at step 0 goes on. A newcomer that was about to
    join meets none of these conditions, and is left to be replaced. So is an incarnation from which another
    one takes nothing any more: a former leader had it fenced, and its microbatches would get nowhere.

    Args:
        decision: the last one in the record; None before the first.
        answers: those of all instances that answered; others are lost to the job.
        roles: stage of each instance, −1 for data instances.
        stages: number of stages.
    """
    step = 0 if decision is None else decision.step + 1
    fenced = {member for answer in answers for member in answer.fenced}
    standing = [answer for answer in answers if answer.member not in fenced]
    stage_members: list[list[Member]] = [[] for _ in range(stages)]
    recommit = []
    for answer in sorted(standing, key=lambda answer: answer.member.sid):
        stage = roles[answer.member]
        if is_data(stage):
            continue
        if answer.version == step:
            stage_members[stage].append(answer.member)
        elif decision is not None and _can_follow(answer, decision, stage):
            stage_members[stage].append(answer.member)
            recommit.append(answer.member)
    return ResumePoint(
        step=step,
        attempt=1 + max((answer.attempt for answer in answers), default=0),
        generation=1 + max((answer.generation for answer in answers), default=0),
        stages=tuple(tuple(members) for members in stage_members),
        data=tuple(answer.member for answer in standing if is_data(roles[answer.member])),
        recommit=tuple(recommit),
    )


def outsiders(known: Iterable[Member], resume_point: ResumePoint) -> tuple[Member, ...]:
    """Those of `known` that do not go on: dead instances, and newcomers that had not joined yet.

    All others are ordered to fence them: a state on its way to one of them would hold up the next commit.
    """
    return tuple(
        sorted(set(known) - set(resume_point.everyone), key=lambda member: (member.sid, member.incarnation))
    )


def _can_follow(answer: Adopted, decision: StepDecision, stage: int) -> bool:
    """The instance is at the decided step, and can apply the decision."""
    if answer.version != decision.step:
        return False
    if decision.quarantined:
        return answer.attempt == decision.attempt and answer.member in decision.membership[stage]
    return answer.prepared == decision.step
