"""The step transaction's messages (DESIGN §5): dispatch, claim, prepare, decide, commit, abort.

Everything is keyed (epoch, step, attempt, microbatch, stage). `stage` -1 is the data unit.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.marks import HOLDS_URL, Url


class Phase(StrEnum):
    """The orchestrator's phase of the open step."""

    CLOSED = "closed"
    GATHERING = "gathering"
    DECIDING = "deciding"
    COMMITTING = "committing"


PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.CLOSED: frozenset({Phase.GATHERING}),
    Phase.GATHERING: frozenset({Phase.DECIDING, Phase.GATHERING}),
    Phase.DECIDING: frozenset({Phase.COMMITTING}),
    Phase.COMMITTING: frozenset({Phase.GATHERING, Phase.CLOSED}),
}
"""Legal transitions of a step. Closed is a step boundary, where validation runs and checkpoints are taken.
Gathering → gathering starts a new attempt of the step. An illegal transition raises `IllegalTransition` with
the step's history."""


class MicrobatchState(StrEnum):
    """The progress of a microbatch at one instance."""

    IDLE = "idle"
    FORWARD_QUEUED = "forward queued"
    FORWARD_DONE = "forward done"
    BACKWARD_QUEUED = "backward queued"
    ACCUMULATED = "accumulated"


MICROBATCH_TRANSITIONS: dict[MicrobatchState, frozenset[MicrobatchState]] = {
    MicrobatchState.IDLE: frozenset({MicrobatchState.FORWARD_QUEUED}),
    MicrobatchState.FORWARD_QUEUED: frozenset({MicrobatchState.FORWARD_DONE, MicrobatchState.ACCUMULATED}),
    MicrobatchState.FORWARD_DONE: frozenset({MicrobatchState.BACKWARD_QUEUED}),
    MicrobatchState.BACKWARD_QUEUED: frozenset({MicrobatchState.ACCUMULATED}),
    MicrobatchState.ACCUMULATED: frozenset(),
}
"""Legal transitions of a microbatch at an instance. Idle: assigned by the orchestrator and not arrived yet.
The last stage computes loss and gradient at once, so it has no `forward done`."""


class Member(Part):
    """One incarnation of one instance: the unit of membership, of votes and of fences."""

    sid: Token
    incarnation: Token

    # Compared and hashed for every microbatch; pydantic's own comparison takes several times as long.
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Member):
            return NotImplemented
        return self.sid == other.sid and self.incarnation == other.incarnation

    def __hash__(self) -> int:
        return hash(self.sid)  # one SID has few incarnations

    @staticmethod
    @lru_cache(maxsize=1 << 16)
    def of(sid: str, incarnation: str) -> Member:
        """The same object for equal arguments: validated once, and compared by identity."""
        return Member(sid=sid, incarnation=incarnation)


class AttemptMessage(Message):
    """A message about one attempt of a step, under an epoch of the job."""

    job: Token
    epoch: int
    step: int
    attempt: int


class VersionMessage(Message):
    """A message about the state after `version` steps, under an epoch of the job."""

    job: Token
    epoch: int
    version: int


class StepBegin(AttemptMessage, wire="step.begin"):
    """SMO → entry MG: dispatch these microbatches to data instances. Repeated until acknowledged."""

    microbatches: tuple[int, ...]
    evaluate: bool = False


class MicrobatchDispatch(AttemptMessage, wire="step.dispatch"):
    """MG → data instance: produce these microbatches and send them on. Acknowledged."""

    microbatches: tuple[int, ...]
    evaluate: bool = False


class MicrobatchClaim(AttemptMessage, wire="step.claim", version=(1, 2)):
    """MI → SMO, off the critical path: this microbatch is in my sum (or, with `evaluate`, was scored).

    `upstream` is the SID that it came from, so that the orchestrator can check that claims link up.
    A loss is the sum over the microbatch, whose `weight` is what it is divided by: of means, 1. Times are
    milliseconds of compute. `metrics` has (sum, count) of each metric of an evaluated microbatch. `replaced`
    counts samples that were put in an unreadable's place; only the first stage knows it.
    """

    microbatch: int
    stage: int
    owner: Member
    upstream: Token
    evaluate: bool = False
    loss: float | None = None
    weight: float = Field(1.0, ge=0, allow_inf_nan=False)
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    metrics: dict[str, tuple[float, float]] = {}
    replaced: int = Field(0, ge=0)


class StepStatus(AttemptMessage, wire="step.status"):
    """SMO → MI: which microbatches of this step do you have? Repairs lost claims (DESIGN §5 rule 11).

    `evaluate` asks for the validation at this step instead: the last stage reports what it scored.
    """

    evaluate: bool = False


class StepStatusReply(Message, wire="step.status.reply"):
    """The instance's answer: its version (steps applied) and all of its claims of the requested step."""

    member: Member
    version: int
    attempt: int
    claims: tuple[MicrobatchClaim, ...]
    waiting: tuple[str, ...] = Field((), description="what it waits for, in words, for `dmsc status`")


class GroupForm(Message, wire="step.group.form", version=(1, 1)):
    """SMO → MI: build the reduction group of (stage, generation) with these members, in this order.

    It admits a newcomer among them. Before the newcomer takes any microbatch it must know the attempt, the
    `fenced` members, and the last fence (`step`, `round`) that all others have answered.
    """

    job: Token
    epoch: int
    stage: int
    step: int = 0
    attempt: int = 0
    round: int = 0
    generation: int
    members: tuple[Member, ...]
    fenced: tuple[Member, ...] = ()
    parts: tuple[float, ...] = Field(
        (), description="how much of the sum each member adds up and finishes for all; empty: equal parts"
    )


class GroupFormed(Message, wire="step.group.formed"):
    member: Member
    generation: int


class TiedStage(Part):
    """Another stage that shares parameters: its layers (the last exclusive), and to whom of it to send."""

    stage: int
    first_layer: int
    last_layer: int
    receivers: tuple[Member, ...]


class StepPrepare(AttemptMessage, wire="step.prepare", version=(1, 1)):
    """SMO → MI: all microbatches of your stage are in some member's sum; all-reduce and vote.

    The sums of parameters that `tied` stages share are exchanged with them, and added. The order is repeated
    when the members of one of them change: then it names other receivers.
    """

    generation: int
    tied: tuple[TiedStage, ...] = ()


class StepVote(Message, wire="step.vote", version=(1, 2)):
    """MI → SMO: my vote. `microbatches` is the set stored beside the sum, never filtered.

    `checksum` is order-sensitive, over the reduced gradient, and equal in all replicas of a stage.
    `squared_norms` has one float64 per parameter tensor in parameter order. `learning_rate` is that of the
    step by the job's own function, where it has one: only instances run users' code. `tied` has a checksum
    for each stage that shares parameters with this one, over their sums: it is equal there. `loss_scale` is
    that of the step, where there is one, and `overflowed` those of `microbatches` whose gradients it made
    infinite: the sum holds nothing of them.
    """

    member: Member
    step: int
    attempt: int
    generation: int
    microbatches: tuple[int, ...]
    checksum: str
    squared_norms: tuple[float, ...]
    reduce_ms: float = 0.0
    learning_rate: float | None = None
    tied: tuple[tuple[int, str], ...] = ()
    loss_scale: float | None = None
    overflowed: tuple[int, ...] = ()


class StepDecision(AttemptMessage, wire="step.decision", version=(1, 3)):
    """The commit point, written by compare-and-set into the bucket `steps` (key: job id).

    `clip` multiplies the reduced gradient; `action` skip advances the version without an update.
    `membership` and `generations` (one per stage) are those that prepared. `quarantined` are microbatches of
    this step that fail wherever they run; then the step is skipped, nothing was prepared, and checksums are
    empty. `learning_rate` is the rate of the update. `stop` is the number of steps after which training ends,
    as far as that is certain; a metric that ends it earlier is noted in the decision of the last step.
    `replaced` counts the step's samples that were put in an unreadable's place, and `replaced_before` those
    of the steps before.
    `loss_scale` is what the losses were multiplied by; where gradients `overflowed` in some microbatches, the
    step is skipped.
    """

    generations: tuple[int, ...]
    membership: tuple[tuple[Member, ...], ...]
    checksums: tuple[str, ...]
    gradient_norm: float
    clip: float
    action: Literal["apply", "skip"]
    quarantined: tuple[int, ...] = ()
    learning_rate: float | None = None
    stop: int | None = None
    replaced: int = 0
    replaced_before: int = 0
    loss_scale: float | None = None
    overflowed: tuple[int, ...] = ()


class StepCommit(AttemptMessage, wire="step.commit", version=(1, 2)):
    """SMO → MI: apply the decision. Idempotent; it must match what was prepared.

    A step that is skipped for `quarantined` microbatches needs no prepare: nothing of it is applied.
    `learning_rate` is the decided one; None, from orchestrators before there was one: compute it.
    """

    generation: int
    checksum: str
    clip: float
    action: Literal["apply", "skip"]
    quarantined: tuple[int, ...] = ()
    learning_rate: float | None = None


class StepApplied(Message, wire="step.applied"):
    member: Member
    version: int = Field(description="steps applied: the next step's number")


class StepAbort(AttemptMessage, wire="step.abort"):
    """SMO → MI: drop all of this step below `attempt`, including sums, queues and the group, at once."""

    fenced: tuple[Member, ...] = Field((), description="incarnations that no longer count")


class StepAborted(Message, wire="step.aborted"):
    member: Member
    version: int


class HeldHop(Part):
    """A microbatch at one instance: its sender, its receiver and its progress.

    For `state` see docs/protocol.md; an `idle` microbatch was assigned here and has not arrived. At a data
    instance `idle` means queued, `forward done` means bound to `downstream`, and `upstream` is itself.
    """

    microbatch: int
    state: MicrobatchState
    upstream: Member
    downstream: Member | None = None


class StepFence(AttemptMessage, wire="step.fence"):
    """SMO → MI: these incarnations are fenced from now on; report what you have of the open step.

    Links to them are dropped, and a reduction group with one of them is released. The instance keeps its
    microbatches and its sum. Idempotent: a `round` above 0 is answered with the same snapshot each time, and
    notices after that answer name the round (`workers/transaction/consistent_snapshot.py`).
    """

    round: int
    fenced: tuple[Member, ...]


class StepFenced(Message, wire="step.fenced"):
    """The fence is in effect here: nothing from the fenced members will be accepted any more."""

    member: Member
    version: int
    round: int
    held: tuple[HeldHop, ...]
    claims: tuple[MicrobatchClaim, ...] = ()


class PathUpdate(Part):
    """New neighbours of one microbatch at one instance. None keeps the present neighbour.

    An instance that does not have the microbatch will be offered it by `upstream`. With `offer` the
    downstream has no input yet, so send it the retained tensors; else it has them (and would decline a copy).
    """

    microbatch: int
    upstream: Member | None = None
    downstream: Member | None = None
    offer: bool = False


class StepAssign(AttemptMessage, wire="step.assign"):
    """SMO → MI: the repaired paths of a lost owner's microbatches (DESIGN §5 rules 1 and 3). Idempotent."""

    round: int
    paths: tuple[PathUpdate, ...]


class Adopt(Message, wire="step.adopt", version=(1, 1)):
    """New SMO → MI: I lead this job in a higher epoch; report your state (DESIGN §5 rule 7).

    The answer promises to refuse every order of a lower epoch. `plan` is the revision of the plan in force:
    an instance that has completed it goes over to it, and forgets any other that it has built.
    """

    job: Token
    epoch: int
    plan: int | None = None


class Adopted(Message, wire="step.adopted", version=(1, 2)):
    """`prepared` is the step whose reduced gradient waits here for a decision; -1 if there is none.

    `fenced` names the incarnations from which this instance takes nothing any more, by order of whoever led.
    """

    member: Member
    version: int
    attempt: int
    generation: int
    prepared: int = -1
    fenced: tuple[Member, ...] = ()
    plan: int | None = Field(None, description="revision of the plan that gives it its layers; none: of none")


class StateSend(Message, wire="state.send"):
    """SMO → MI: stream your parameters and optimizer state to this newcomer, as transfer number `transfer`.

    With `follow` the newcomer follows you while you train, by a snapshot and then each step as a redo. That
    is answered once it has caught up, or else after a while, and then requested again. Without `follow` the
    state of `version` is sent, and you apply no step meanwhile.
    """

    job: Token
    epoch: int
    to: Member
    version: int
    transfer: int = Field(0, ge=0, description="of this newcomer in this epoch; a higher one overtakes")
    follow: bool = False


class StateRestore(VersionMessage, wire="state.restore"):
    """SMO → MI: take the state of `version` from a checkpoint, or from the seed if there is no `checkpoint`.

    `checkpoint` is the URL of the folder that holds the manifest.
    """

    checkpoint: Annotated[str | None, HOLDS_URL] = None


class StateReady(Message, wire="state.ready"):
    """The answer to `StateSend` and `StateRestore`, and to `StateWait`.

    In the answer to a `StateSend` with `follow`, `version` is the version that the newcomer has reached, −1
    while it is under way; `slow` means that it did not keep up and no longer follows.
    """

    member: Member
    version: int
    bytes: int = 0
    slow: bool = False


class StateWait(VersionMessage, wire="state.wait"):
    """SMO → newcomer: answer once you have the state of `version`, or `Conflict` if you don't in time."""

    within_s: float | None = Field(None, gt=0, description="seconds; none: however long it takes")


class ExportOrder(VersionMessage, wire="state.export", version=(1, 1)):
    """SMO → one replica per stage: write your weights as a safetensors shard below this URL.

    If `after` is empty: write, and report the first tensors; if it is a name: report the tensors after it; if
    it is None, as in orders before there were pages: write, and report all of them at once.
    """

    url: Url
    shard: str
    after: str | None = None


class Exported(Message, wire="state.exported", version=(1, 2)):
    """What was written. `tensors` maps each full parameter name to `dtype shape sha256(bytes)`.

    With `more` there are further tensors after the last of these. `names` are those of these tensors whose
    name in the shard is another; `files` are written beside the shards.
    """

    member: Member
    version: int
    url: Url
    bytes: int
    tensors: dict[str, str] = {}
    more: bool = False
    names: dict[str, str] = Field({}, description="full parameter name → name in the shard")
    files: tuple[str, ...] = ()
