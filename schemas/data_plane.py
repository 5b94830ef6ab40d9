"""Hops of microbatches between instances: notices on the bus, tensors over torch.distributed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.routing import DEFAULT_ALGORITHM
from schemas.step import Member


class TensorMeta(Part):
    """One tensor of a hop. `shape` in full; dtype as torch spells it without the prefix."""

    shape: tuple[int, ...]
    dtype: str


class HopLoad(Part):
    """What a receiver says of itself in passing: microbatches that it has and has not summed yet, and its
    moving average of compute per microbatch, forward plus backward (0: not measured)."""

    open: int
    service_ms: float = 0.0


class MicrobatchNotice(Message, wire="data.notice", version=(1, 2)):
    """Sender → receiver: these tensors wait for you on our link; repeated until accepted (rule 11).

    direction `forward`: activations and what travels with them (targets); `backward`: the gradient of
    what was sent forward (no tensors after an evaluation: it only returns the credit);
    `state`: parameters and optimizer state of version `step`, for a newcomer; `copy`: the same, for a
    holder of a peer copy (no tensors: forget it); `redo`: the clipped mean gradients that `step` was
    applied with (no tensors: it was skipped), for a holder, or for a newcomer after its state. `transfer`
    numbers what a newcomer is sent: its redos belong to the state of the same number.
    `link` names the process group (both ends build it on first sight); `tag` is the first of
    `len(tensors)` consecutive tags on it. `load`: how the sender is, when it returns a microbatch.
    """

    job: Token
    epoch: int
    step: int
    attempt: int
    microbatch: int
    stage: int = Field(description="the receiver's stage; of `copy` and `redo`: the copied one")
    round: int = Field(default=0, description="of the fence that the sender answered last in this step")
    direction: Literal["forward", "backward", "state", "copy", "redo"]
    sender: Member
    receiver: Member
    link: str
    tag: int
    tensors: tuple[TensorMeta, ...]
    evaluate: bool = False
    load: HopLoad | None = None
    transfer: int = 0


class NoticeAnswer(Message, wire="data.notice.answer", version=(1, 1)):
    """Receiver → sender. `held`: I have it already; `stale`: older than my step or attempt. `load`: mine."""

    job: Token
    step: int
    attempt: int
    microbatch: int
    direction: Literal["forward", "backward", "state", "copy", "redo"]
    receiver: Member
    link: str
    tag: int
    answer: Literal["accepted", "held", "stale", "later"]
    load: HopLoad | None = None


class RouteEntry(Part):
    """One possible next hop. Weight 0 is a standby, or one that is ejected; `window` bounds what one sender
    may have open. `service_ms` per microbatch and `link_ms` per transfer as the router measured them (0:
    not known); a sender that has heard newer figures from the instance itself goes by those."""

    sid: Token
    incarnation: Token
    cluster: Token
    weight: float = Field(ge=0)
    window: int = Field(ge=1)
    service_ms: float = Field(0.0, ge=0)
    link_ms: float = Field(0.0, ge=0)
    reason: str = ""


class RouteTable(Message, wire="route.table", version=(1, 1)):
    """A router's table for one stage of a job, for the senders of one cluster, who choose by `algorithm`.

    Kept in the bucket `routes` under `<job>.<cluster>.<stage>`; senders watch `<job>.<cluster>.>`.
    """

    job: Token
    cluster: Token
    stage: int
    revision: int
    router: Token
    entries: tuple[RouteEntry, ...]
    algorithm: str = DEFAULT_ALGORITHM
    reason: str = ""
