"""Hops of microbatches between instances: notices on the bus, tensors over torch.distributed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.routing import DEFAULT_ALGORITHM
from schemas.step import AttemptMessage, Member

HopDirection = Literal[
    "forward",
    "backward",
    "state",
    "copy",
    "redo",
    "tied",
    "pull",
    "records",
    "block",
    "layers",
    "layers_redo",
    "wave",
]


class TensorMeta(Part):
    """One tensor of a hop. `shape` in full; dtype as torch spells it without the prefix."""

    shape: tuple[int, ...]
    dtype: str


class HopLoad(Part):
    """A receiver's load, sent along with answers.

    `open` counts its microbatches that are not in its sum yet; `service_ms` is its moving average of compute
    per microbatch, forward plus backward (0: not measured).
    """

    open: int
    service_ms: float = 0.0


class MicrobatchNotice(AttemptMessage, wire="data.notice", version=(1, 6)):
    """Sender → receiver: these tensors wait for you on our link; repeated until accepted (rule 11).

    Directions: `forward` has activations and what travels with them (targets); `backward` has the gradient of
    what was sent forward (no tensors after an evaluation: it only returns the credit);
    `state` has parameters and optimizer state of version `step`, for a newcomer; `copy` has the same for a
    holder of a peer copy (no tensors: drop the copy); `redo` has the clipped mean gradients with which `step`
    was applied (no tensors: it was skipped), for a holder, or for a newcomer after its state; `tied` has the
    sums of parameters that the sender's stage, `stage`, shares with the receiver's; `pull` has no tensors and
    asks a unit before the entry for a microbatch's samples, and `records` has them, in one tensor; `block`
    has a block of the cache, for another node's data instance. `layers` has the state of layers, of version
    `step`, under its names, for a member that gets them by the plan of revision `transfer`, and `layers_redo`
    the gradients with which `step` was applied there; `microbatch` is the first of the layers. `wave` has a
    table and rows of sessions that a version of a service works on (ADR-0144). `transfer`
    numbers the transfers to a newcomer: its redos belong to the state of the same number; of `block` it is
    that of `BlockSend`. `learning_rate` is that of a redo's step.
    `link` names the process group (both ends build it when they first need it); `tag` is the first of
    `len(tensors)` consecutive tags on it. `load` is the sender's load when it returns a microbatch.
    """

    microbatch: int
    stage: int = Field(description="the receiver's stage; of `copy` and `redo`: the copied one")
    round: int = Field(default=0, description="of the fence that the sender answered last in this step")
    direction: HopDirection
    sender: Member
    receiver: Member
    link: str
    tag: int
    tensors: tuple[TensorMeta, ...]
    evaluate: bool = False
    replaced: int = Field(0, ge=0, description="of a microbatch's samples those put in an unreadable's place")
    load: HopLoad | None = None
    transfer: int = 0
    learning_rate: float | None = None
    plan: int | None = Field(None, description="of a stage's state: revision of the plan that cuts it so")


class NoticeAnswer(Message, wire="data.notice.answer", version=(1, 5)):
    """Receiver → sender. `held`: I have it; `stale`: it is older than my step or attempt. `load` is mine."""

    job: Token
    step: int
    attempt: int
    microbatch: int
    direction: HopDirection
    receiver: Member
    link: str
    tag: int
    answer: Literal["accepted", "held", "stale", "later"]
    load: HopLoad | None = None


class RouteEntry(Part):
    """One possible next hop. Weight 0 means a standby or an ejected instance.

    `window` bounds the microbatches that one sender may have open there. `service_ms` per microbatch and
    `link_ms` per transfer are the router's measurements (0: not known); a sender prefers newer figures from
    the instance itself.
    """

    sid: Token
    incarnation: Token
    cluster: Token
    weight: float = Field(ge=0)
    window: int = Field(ge=1)
    service_ms: float = Field(0.0, ge=0)
    link_ms: float = Field(0.0, ge=0)
    hops: int = Field(0, ge=0, description="links to its cluster by the mesh's topology file; 0: not known")
    reason: str = ""


class RouteTable(Message, wire="route.table", version=(1, 4)):
    """A router's table for one stage of a job, for the senders of one cluster, who choose by `algorithm`.

    Kept in the bucket `routes` under `<job>.<cluster>.<stage>`; senders watch those of all clusters and go by
    the newest one that is for theirs. `guests`: clusters without a router, for whose senders it is as well.
    """

    job: Token
    cluster: Token
    stage: int
    revision: int
    router: Token
    entries: tuple[RouteEntry, ...]
    algorithm: str = DEFAULT_ALGORITHM
    reason: str = ""
    guests: tuple[Token, ...] = ()
    admitted_per_s: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="microbatches that each sender may send; 0: no limit"
    )
