"""What the orchestrator's step machine hears (events) and asks for (effects); see `step_machine`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from entities.orchestrator.transaction.step_ledger import StepLedger
from schemas.step import Member, MicrobatchClaim, PathUpdate, StepDecision, StepFenced, StepVote


# --- events -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Opened:
    """The shell opens the step (the first one, or after a pause). `attempt` is above any used before."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The gateway has handed all microbatches of the step to data instances."""

    step: int
    attempt: int


@dataclass(slots=True)  # one for each microbatch and stage: freezing takes longer than all else of it
class Claimed:
    claim: MicrobatchClaim


@dataclass(frozen=True, slots=True)
class IncarnationLost:
    """This incarnation no longer counts, whatever became of it."""

    member: Member


@dataclass(frozen=True, slots=True)
class FenceAcknowledged:
    """All living instances acknowledged the fence of this round."""

    round: int
    answers: tuple[StepFenced, ...]


@dataclass(frozen=True, slots=True)
class Assigned:
    """All addressees of the last `Assign` of this round have it."""

    round: int


@dataclass(frozen=True, slots=True)
class ReductionGroupFormed:
    stage: int
    generation: int


@dataclass(frozen=True, slots=True)
class ReductionGroupFailed:
    """A group could not be built, or its reduction broke. `edges`: who found whom silent, by its errors."""

    stage: int
    generation: int
    edges: tuple[tuple[Member, Member], ...] = ()


@dataclass(slots=True)  # one for each microbatch and stage: freezing takes longer than all else of it
class Voted:
    stage: int
    vote: StepVote


@dataclass(frozen=True, slots=True)
class DecisionRecorded:
    """The decision is in the record: the commit point is passed."""

    decision: StepDecision


@dataclass(frozen=True, slots=True)
class Committed:
    """Every member has applied the step, or is `silent`."""

    step: int
    silent: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class NewcomerReady:
    """A newcomer is ready: a data instance to work, a stage instance (stage ≥ 0) to take the state."""

    member: Member
    stage: int


@dataclass(frozen=True, slots=True)
class Followed:
    """A newcomer was brought to `version`, where its source was then; `slow`: it can't keep up with that."""

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
    """What this transfer was to bring does not arrive."""

    member: Member
    transfer: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A stage that had lost everyone has these members again, at the open step's version."""

    stage: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Stalled:
    """The step does not move although nobody is known to be lost: begin it again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """All that live have forgotten the step below this attempt."""

    attempt: int


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
    """Order the fence at `targets`; answered by `FenceAcknowledged` once all have, or by `IncarnationLost` of
    one of them."""

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
    round: int  # the last one that all others have answered in this step
    generation: int
    members: tuple[Member, ...]
    fenced: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have the stage all-reduce; each member answers by `Voted`, or one by `ReductionGroupFailed`."""

    stage: int
    step: int
    attempt: int
    generation: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Record:
    decision: StepDecision


@dataclass(frozen=True, slots=True)
class Commit:
    """`ledger` is the decided step's account, for its result."""

    decision: StepDecision
    ledger: StepLedger


@dataclass(frozen=True, slots=True)
class Boundary:
    """The steps before `step` are committed, and the shell asked for a pause here; it sends `Opened`."""

    step: int


@dataclass(frozen=True, slots=True)
class SendState:
    """Have `source` bring its state to `to`, as transfer number `transfer`.

    `follow`: while steps go on; answered by `Followed` or `JoinFailed`, and given again where that came too
    late. Otherwise the state at `version`, which does not change meanwhile; answered by `Joined` or
    `JoinFailed`.
    """

    source: Member
    to: Member
    version: int
    transfer: int
    follow: bool


@dataclass(frozen=True, slots=True)
class AwaitState:
    """Ask a newcomer that follows for `version`: its last redo. Answered by `Joined` or `JoinFailed`."""

    to: Member
    version: int
    transfer: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Have `source` stop sending its state to a newcomer that was lost: until then it may not commit."""

    newcomer: Member
    source: Member
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StageLost:
    """Nobody of the stage lives: bring it back at `version` (`Restored`), or roll all back."""

    stage: int
    version: int


@dataclass(frozen=True, slots=True)
class Condemn:
    """Nobody died as far as is known, but this one cannot work with the others: it is fenced (rule 8)."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Have all forget the step below `attempt`; answered by `Restarted`."""

    attempt: int
    fenced: tuple[Member, ...]
    targets: tuple[Member, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RecomputationNoted:
    """For the record: these (stage, microbatch) pairs are computed again, because of these losses."""

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
    """A set of members as effects and orders name it: always in the same order, so that schedules replay."""
    return tuple(sorted(members, key=lambda member: (member.sid, member.incarnation)))
