"""The step transaction's messages (DESIGN §5): dispatch, claim, prepare, decide, commit, abort.

Everything is keyed (epoch, step, attempt, microbatch, stage). `stage` -1 is the data unit.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Message, Part, Token


class Member(Part):
    """One incarnation of one instance: the unit of membership, of votes and of fences."""

    sid: Token
    incarnation: Token


class StepBegin(Message, wire="step.begin"):
    """SMO → entry MG: dispatch these microbatches to data instances. Repeated until acknowledged."""

    job: Token
    epoch: int
    step: int
    attempt: int
    microbatches: tuple[int, ...]
    evaluate: bool = False


class MicrobatchDispatch(Message, wire="step.dispatch"):
    """MG → data instance: produce these microbatches and send them on. Acknowledged."""

    job: Token
    epoch: int
    step: int
    attempt: int
    microbatches: tuple[int, ...]
    evaluate: bool = False


class MicrobatchClaim(Message, wire="step.claim"):
    """MI → SMO, off the critical path: this microbatch is in my sum (or, `evaluate`, was scored).

    `upstream` is the SID it came from, so that the orchestrator can check that claims link up.
    Losses are means over the microbatch; times are milliseconds of compute.
    """

    job: Token
    epoch: int
    step: int
    attempt: int
    microbatch: int
    stage: int
    owner: Member
    upstream: Token
    evaluate: bool = False
    loss: float | None = None
    forward_ms: float = 0.0
    backward_ms: float = 0.0


class StepStatus(Message, wire="step.status"):
    """SMO → MI: what do you hold of this step? Repairs lost claims (DESIGN §5 rule 11).

    `evaluate` asks for the validation at this step instead: the last stage tells what it scored.
    """

    job: Token
    epoch: int
    step: int
    attempt: int
    evaluate: bool = False


class StepStatusReply(Message, wire="step.status.reply"):
    """The instance's own account: its version (steps applied) and all claims of the asked step."""

    member: Member
    version: int
    attempt: int
    claims: tuple[MicrobatchClaim, ...]
    waiting: tuple[str, ...] = Field((), description="what it waits for, in words, for `dmsc status`")


class GroupForm(Message, wire="step.group.form"):
    """SMO → MI: build the reduction group of (stage, generation) with these members, in this order."""

    job: Token
    epoch: int
    stage: int
    generation: int
    members: tuple[Member, ...]


class GroupFormed(Message, wire="step.group.formed"):
    member: Member
    generation: int


class StepPrepare(Message, wire="step.prepare"):
    """SMO → MI: all microbatches of your stage are summed somewhere; all-reduce and vote."""

    job: Token
    epoch: int
    step: int
    attempt: int
    generation: int


class StepVote(Message, wire="step.vote"):
    """MI → SMO: what I hold. `microbatches` is the set stored beside the sum, never filtered.

    `checksum` is order-sensitive, over the reduced gradient, equal in all replicas of a stage.
    `squared_norms` has one float64 per parameter tensor in parameter order.
    """

    member: Member
    step: int
    attempt: int
    generation: int
    microbatches: tuple[int, ...]
    checksum: str
    squared_norms: tuple[float, ...]
    reduce_ms: float = 0.0


class StepDecision(Message, wire="step.decision"):
    """The commit point, written by compare-and-set into the bucket `steps` (key: job id).

    `clip` multiplies the reduced gradient; `action` skip advances the version without an update.
    `membership` and `generations` (one per stage) are those that prepared.
    """

    job: Token
    epoch: int
    step: int
    attempt: int
    generations: tuple[int, ...]
    membership: tuple[tuple[Member, ...], ...]
    checksums: tuple[str, ...]
    gradient_norm: float
    clip: float
    action: Literal["apply", "skip"]


class StepCommit(Message, wire="step.commit"):
    """SMO → MI: the decision, to be applied. Idempotent; must match what was prepared."""

    job: Token
    epoch: int
    step: int
    attempt: int
    generation: int
    checksum: str
    clip: float
    action: Literal["apply", "skip"]


class StepApplied(Message, wire="step.applied"):
    member: Member
    version: int = Field(description="steps applied: the next step's number")


class StepAbort(Message, wire="step.abort"):
    """SMO → MI: forget all of this step below `attempt`; sums, queues and the group go at once."""

    job: Token
    epoch: int
    step: int
    attempt: int
    fenced: tuple[Member, ...] = Field((), description="incarnations that no longer count")


class StepAborted(Message, wire="step.aborted"):
    member: Member
    version: int


class StateSend(Message, wire="state.send"):
    """SMO → MI: stream your parameters and optimizer state at `version` to this newcomer."""

    job: Token
    epoch: int
    to: Member
    version: int


class StateRestore(Message, wire="state.restore"):
    """SMO → MI: take the state of `version` from a checkpoint; no `checkpoint`: from the seed."""

    job: Token
    epoch: int
    version: int
    checkpoint: str | None = None


class StateReady(Message, wire="state.ready"):
    """The answer to `StateSend` and `StateRestore`, and to `StateWait`."""

    member: Member
    version: int
    bytes: int = 0


class StateWait(Message, wire="state.wait"):
    """SMO → newcomer: answer once you hold the state of `version`."""

    job: Token
    epoch: int
    version: int


class CheckpointOrder(Message, wire="state.checkpoint"):
    """SMO → one replica per stage: write your state at `version` below this URL."""

    job: Token
    epoch: int
    version: int
    url: str


class ExportOrder(Message, wire="state.export"):
    """SMO → one replica per stage: write your weights as a safetensors shard below this URL."""

    job: Token
    epoch: int
    version: int
    url: str
    shard: str


class Exported(Message, wire="state.exported"):
    """What was written. `tensors` maps each full parameter name to `dtype shape sha256(bytes)`."""

    member: Member
    version: int
    url: str
    bytes: int
    tensors: dict[str, str] = {}
