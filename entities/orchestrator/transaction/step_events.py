"""The vocabulary of the step machine: the events that it takes, and the effects that it asks for.

The shell (`step_loop`) carries out each effect and answers by the event that the effect's docstring names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from entities.orchestrator.transaction.step_ledger import StepLedger
from schemas.step import Member, MicrobatchClaim, PathUpdate, StepDecision, StepFenced, StepVote


# --- events -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Opened:
    """The shell opens a step: the first one, or one after a pause. `attempt` is above any used before."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The gateway has handed all microbatches of the step to data instances."""

    step: int
    attempt: int


@dataclass(slots=True)  # one for each microbatch and stage; frozen=True would cost more than all the rest
class Claimed:
    """A microbatch is in an instance's sum."""

    claim: MicrobatchClaim


@dataclass(frozen=True, slots=True)
class IncarnationLost:
    """This incarnation no longer counts, whether its process lives or not."""

    member: Member


@dataclass(frozen=True, slots=True)
class FenceAcknowledged:
    """All living instances acknowledged the fence of this round, and said what they hold."""

    round: int
    answers: tuple[StepFenced, ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """All addressees of this round's last `Assign` have acknowledged it."""

    round: int


@dataclass(frozen=True, slots=True)
class ReductionGroupFormed:
    """All members of the stage have built the group of this generation."""

    stage: int
    generation: int


@dataclass(frozen=True, slots=True)
class ReductionGroupFailed:
    """A group could not be built, or its reduction broke. `edges`: (witness, silent peer), by the errors;
    `why`: the first of the errors, with its member; `answered`: who has answered the order, and so lives."""

    stage: int
    generation: int
    edges: tuple[tuple[Member, Member], ...] = ()
    why: str = ""
    answered: tuple[Member, ...] = ()


@dataclass(slots=True)  # as `Claimed`
class Voted:
    """A member has prepared: its vote on the reduced gradient."""

    stage: int
    vote: StepVote


@dataclass(frozen=True, slots=True)
class DecisionRecorded:
    """The decision is in the record: the commit point has passed."""

    decision: StepDecision


@dataclass(frozen=True, slots=True)
class Committed:
    """Every member has applied the step, except those in `silent`, which did not answer."""

    step: int
    silent: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class NewcomerReady:
    """A newcomer has started: a data instance can work, a stage instance (stage ≥ 0) can take the state."""

    member: Member
    stage: int


@dataclass(frozen=True, slots=True)
class Followed:
    """A newcomer has reached `version`, where its source was then; `slow`: it can't keep up with it."""

    member: Member
    transfer: int
    version: int
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """The newcomer holds the state of `version`."""

    member: Member
    transfer: int
    version: int


@dataclass(frozen=True, slots=True)
class JoinFailed:
    """This transfer failed: its state does not arrive."""

    member: Member
    transfer: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A stage that had lost all its members has these again, at the open step's version."""

    stage: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Stalled:
    """The step makes no progress although no member is known to be lost: begin it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """All living members have forgotten the attempts of the step below this one."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Relaid:
    """A stage's sums are to be reduced in another layout: its group is formed anew before the next step."""

    stage: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Opened
    | Begun
    | Claimed
    | IncarnationLost
    | FenceAcknowledged
    | Assigned
    | ReductionGroupFormed
    | ReductionGroupFailed
    | Voted
    | DecisionRecorded
    | Committed
    | NewcomerReady
    | Followed
    | Joined
    | JoinFailed
    | Restored
    | Stalled
    | Restarted
    | Relaid
    | Tick
)


# --- effects ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Begin:
    """Have the gateway dispatch the step; answered by `Begun`."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Order the fence at `targets`.

    Answered by `FenceAcknowledged` once all have acknowledged, or by `IncarnationLost` of one of them.
    """

    round: int
    step: int
    attempt: int
    fenced: tuple[Member, ...]
    targets: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Assign:
    """Order these path updates; answered by `Assigned`, or by `IncarnationLost` of an addressee."""

    round: int
    step: int
    attempt: int
    paths: Mapping[Member, tuple[PathUpdate, ...]]


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Have the stage build its reduction group; a newcomer among `members` learns where the job is."""

    stage: int
    step: int
    attempt: int
    round: int  # the last round of this step that all others have answered
    generation: int
    members: tuple[Member, ...]
    fenced: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have the stage all-reduce; answered by `Voted` of each member, or by `ReductionGroupFailed`.

    `tied`: stages that share parameters with it, and their members.
    """

    stage: int
    step: int
    attempt: int
    generation: int
    members: tuple[Member, ...]
    tied: tuple[tuple[int, tuple[Member, ...]], ...] = ()

    def receivers(self, place: int) -> list[tuple[int, tuple[Member, ...]]]:
        """To whom the member at `place` sends its stage's sum, by tied stage: each has one sender."""
        return [(stage, members[place :: len(self.members)]) for stage, members in self.tied]


@dataclass(frozen=True, slots=True)
class Record:
    """Write the decision into the decision record; answered by `DecisionRecorded`."""

    decision: StepDecision


@dataclass(frozen=True, slots=True)
class Commit:
    """Have all members apply the decision; answered by `Committed`. `ledger`: the decided step's account."""

    decision: StepDecision
    ledger: StepLedger


@dataclass(frozen=True, slots=True)
class Boundary:
    """All steps before `step` are committed, and the shell wanted a pause here; it goes on by `Opened`."""

    step: int


@dataclass(frozen=True, slots=True)
class SendState:
    """Have `source` send its state to `to`, as transfer number `transfer`.

    With `follow`, steps go on meanwhile; answered by `Followed` or `JoinFailed`, and asked for again where
    `Followed` came too late. Without it, the state at `version` is sent, which does not change meanwhile;
    answered by `Joined` or `JoinFailed`.
    """

    source: Member
    to: Member
    version: int
    transfer: int
    follow: bool


@dataclass(frozen=True, slots=True)
class AwaitState:
    """Ask a following newcomer for `version`, its last redo; answered by `Joined` or `JoinFailed`."""

    to: Member
    version: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Have `source` stop sending its state to a lost newcomer: it can't commit while it still sends."""

    newcomer: Member
    source: Member
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StageLost:
    """The stage has no living member: bring it back at `version` (`Restored`), or roll all stages back."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class Condemn:
    """No death is known, but this member cannot work with the others: it has to be fenced (rule 8)."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Have all members forget the attempts of the step below `attempt`; answered by `Restarted`."""

    attempt: int
    fenced: tuple[Member, ...]
    targets: tuple[Member, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RecomputationNoted:
    """To be logged: these (stage, microbatch) pairs are computed again because of these losses."""

    lost: tuple[Member, ...]
    replayed: tuple[tuple[int, int], ...]


Effect = (
    Begin
    | Fence
    | Assign
    | FormGroup
    | Prepare
    | Record
    | Commit
    | Boundary
    | SendState
    | StageLost
    | AwaitState
    | Condemn
    | Restart
    | RecomputationNoted
    | Withdraw
)


def in_order(members: Iterable[Member]) -> tuple[Member, ...]:
    """The members in the order of effects and orders: always the same, so that schedules replay."""
    return tuple(sorted(members, key=lambda member: (member.sid, member.incarnation)))
