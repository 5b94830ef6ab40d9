"""Functional modules (draft §4.2): lifecycle, suggestions, the orchestrator's decisions, and their scores."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from schemas import names
from schemas.base import Message, Part, Time, Token
from schemas.marks import EnvelopeId
from schemas.stage_move import MoveForecast


class ModuleState(StrEnum):
    REGISTERED = "registered"
    SHADOW = "shadow"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    DRAINING = "draining"
    RETIRED = "retired"


_off = frozenset({ModuleState.SUSPENDED, ModuleState.DRAINING, ModuleState.RETIRED})
MODULE_TRANSITIONS: dict[ModuleState, frozenset[ModuleState]] = {
    ModuleState.REGISTERED: frozenset(
        {ModuleState.SHADOW, ModuleState.ACTIVE, ModuleState.DRAINING, ModuleState.RETIRED}
    ),
    ModuleState.SHADOW: frozenset({ModuleState.ACTIVE, *_off}),
    ModuleState.ACTIVE: frozenset({ModuleState.SHADOW, *_off}),
    ModuleState.SUSPENDED: frozenset(
        {ModuleState.SHADOW, ModuleState.ACTIVE, ModuleState.DRAINING, ModuleState.RETIRED}
    ),
    ModuleState.DRAINING: frozenset({ModuleState.RETIRED}),
    ModuleState.RETIRED: frozenset(),
}
"""Legal transitions of one life of a module: a new process starts again at registered."""


class ModuleLifecycle(Message, wire="policy.lifecycle", version=(1, 2)):
    """A functional module announces its identity and state (draft §4.2, lifecycle control)."""

    module: Token
    version: str
    state: ModuleState
    subscribes: tuple[str, ...] = ()
    jobs: tuple[Token, ...] = Field((), description="empty: all jobs")
    without: tuple[Token, ...] = Field((), description="jobs it is disabled for")
    sid: Token | None = Field(None, description="its name on the bus, at which it takes orders")
    incarnation: Token | None = None
    reason: str = ""
    owner: Token = Field(
        names.MESH, description="the user for whose jobs alone it suggests; `system`: for all"
    )


class ModuleOp(StrEnum):
    """An order to a module."""

    ACTIVATE = "activate"
    SHADOW = "shadow"
    DRAIN = "drain"
    ENABLE = "enable"
    DISABLE = "disable"


class ModuleOrder(Message, wire="policy.order"):
    """SMO → module: change your state, or the jobs that you are enabled for (draft §4.2, lifecycle control).

    The answer is the module's lifecycle after the order. An order that was obeyed already changes nothing, so
    it may be repeated. `drain` is answered with `draining`; the module retires by itself.
    """

    op: ModuleOp
    jobs: tuple[Token, ...] = Field((), description="enable, disable: which; else empty")
    reason: str = ""


class DirectModule(Message, wire="policy.direct"):
    """MG → SMO: give a running version of a module this order. The answer is its lifecycle after it."""

    module: Token
    version: str | None = Field(None, description="none: the only one that runs")
    op: ModuleOp
    jobs: tuple[Token, ...] = ()
    reason: str = ""
    user: str


class SetWeights(Part):
    """Spread one stage's microbatches by these relative weights (SID → weight ≥ 0)."""

    action: Literal["set_weights"] = "set_weights"
    stage: int
    weights: dict[str, float]


class AvoidInstance(Part):
    """Send nothing to this instance while the suggestion is valid."""

    action: Literal["avoid_instance"] = "avoid_instance"
    sid: Token


class MoveInstance(Part):
    """Have this instance leave its stage; its slot then hosts an instance of `stage`, with a peer's state."""

    action: Literal["move_instance"] = "move_instance"
    sid: Token
    stage: int
    forecast: MoveForecast


class ExpectFailures(Part):
    """Expect a failure of the job every `between_s` seconds.

    The `auto` interval between checkpoints follows from it and from their cost.
    """

    action: Literal["expect_failures"] = "expect_failures"
    between_s: float


class NoAction(Part):
    """An observation without a suggested action; kept on the stream, never adopted."""

    action: Literal["none"] = "none"
    note: str = ""


Action = SetWeights | AvoidInstance | MoveInstance | ExpectFailures | NoAction


def scope_of(action: Action) -> str:
    """The scope of an action: `stage 1`, `instance x`, or the whole `job`."""
    match action:
        case SetWeights(stage=stage):
            return f"stage {stage}"
        case AvoidInstance(sid=sid) | MoveInstance(sid=sid):
            return f"instance {sid}"
        case ExpectFailures() | NoAction():
            return "job"


class PolicySuggestion(Message, wire="policy.suggestion", version=(1, 3)):
    """A module's suggestion: action, confidence, reason, and how long it is valid.

    `scope` is the part of the job that it concerns, by `scope_of`. `input_revision` is the last step that the
    module had seen.
    """

    module: Token
    version: str
    job: Token
    action: Action = Field(discriminator="action")
    confidence: float = Field(ge=0, le=1)
    reason: str
    input_revision: int
    valid_s: float = Field(gt=0)
    scope: str = Field("", description="job, stage N, or instance SID; empty: of a sender that knows none")
    owner: Token = Field(names.MESH, description="as in the module's lifecycle")


class PolicyDecision(Message, wire="policy.decision"):
    """The orchestrator's answer on the stream: adopted or declined, always with the reason."""

    module: Token
    version: str
    job: Token
    suggestion: EnvelopeId = Field(description="envelope id of the suggestion")
    adopted: bool
    reason: str
    policy_revision: int | None = None


class PolicyScore(Message, wire="policy.score", version=(1, 1)):
    """The value of a suggestion, by what then happened (docs/policies-scoring.md); from its module's host.

    `score` is 1 if hindsight would have suggested the same, 0.5 if it was no better than doing nothing, None
    if what happened says nothing about it. For a fault that an avoiding module did not foresee, `action` is
    `missed` and `suggestion` is empty.
    """

    module: Token
    version: str
    job: Token
    suggestion: EnvelopeId = Field("", description="envelope id of the suggestion")
    action: str
    at: Time = Field(description="when it was suggested")
    step: int
    shadow: bool = Field(description="whether the module was in shadow when this was said")
    confidence: float = Field(ge=0, le=1)
    adopted: bool
    score: float | None = Field(ge=0, le=1)
    right: bool | None = Field(description="whether it was better than doing nothing")
    reason: str
    owner: Token = Field(names.MESH, description="as in the module's lifecycle")


class PromoteModule(Message, wire="policy.promote"):
    """MG → SMO: make this running version the active one; the former active version goes on in shadow."""

    module: Token
    version: str
    reason: str = ""
    user: str


class RollBackModule(Message, wire="policy.rollback"):
    """MG → SMO: make the version active again that was active before the last promotion."""

    module: Token
    reason: str = ""
    user: str


class PolicySwitch(Message, wire="policy.switch"):
    """Another version of a module is active from now on; the former one goes on in shadow."""

    module: Token
    version: str
    previous: str
    rollback: bool = False
    by: str = Field(description="user, or `orchestrator` for a rollback of its own")
    reason: str


class ModuleStanding(Message, wire="policy.module-standing", version=(1, 1)):
    """The orders to one version of a module and its record so far, kept for the next orchestrator.

    In the bucket `standings`. Times are seconds since the epoch.
    """

    module: Token
    version: str
    sid: Token | None = None
    incarnation: Token | None = None
    state: ModuleState
    jobs: tuple[Token, ...] = ()
    without: tuple[Token, ...] = ()
    said: str = ""
    wanted: ModuleState | None = Field(None, description="ordered: active or in shadow")
    enabled: tuple[Token, ...] = Field((), description="ordered: for these jobs")
    disabled: tuple[Token, ...] = Field((), description="ordered: not for these jobs")
    suggestions: int = 0
    adopted: int = 0
    strikes: int = 0
    crashes: int = 0
    crashed_at: tuple[Time, ...] = ()
    suspended_until: Time | None = None
    suspended_for: str = ""
    owner: Token = names.MESH


class ModuleRecord(Message, wire="policy.module"):
    """The active version of a module, as the orchestrator keeps it in the bucket `modules`.

    Versions of a module without a record are active or in shadow by their own lifecycle. During a `trial` the
    active version is compared with `previous`, and replaced by it if it is worse.
    """

    module: Token
    active: str
    previous: str = ""
    since: Time
    by: str
    reason: str
    trial: bool = False
