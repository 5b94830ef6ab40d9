"""Functional modules (draft §4.2): lifecycle, suggestions, the orchestrator's decisions, and their scores."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from schemas import names
from schemas.actions import (
    Action,
    AvoidInstance,
    Detour,
    ExpectFailures,
    MoveInstance,
    NoAction,
    SetWeights,
    scope_of,
)
from schemas.base import Message, Time, Token
from schemas.changes import JobObjective
from schemas.learnt_state import Digest
from schemas.marks import EnvelopeId

__all__ = [
    "MODULE_TRANSITIONS",
    "Action",
    "AvoidInstance",
    "Detour",
    "DirectModule",
    "ExpectFailures",
    "ModuleDrift",
    "ModuleLifecycle",
    "ModuleOp",
    "ModuleOrder",
    "ModuleRecord",
    "ModuleStanding",
    "ModuleState",
    "MoveInstance",
    "NoAction",
    "PolicyDecision",
    "PolicyScore",
    "PolicySuggestion",
    "PolicySwitch",
    "PromoteModule",
    "RollBackModule",
    "SetWeights",
    "scope_of",
]


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


class ModuleLifecycle(Message, wire="policy.lifecycle", version=(1, 4)):
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
    drift: str = Field("", description="why what it learnt no longer fits what happens; empty: it does")
    answers_faults: bool = Field(False, description="it says what to do about a fault at hand")


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


class PolicySuggestion(Message, wire="policy.suggestion", version=(1, 7)):
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
    scope: str = Field(
        "", description="job, stage N, instance SID or service NAME; empty: of a sender that knows none"
    )
    owner: Token = Field(names.MESH, description="as in the module's lifecycle")
    state: Digest = Field("", description="digest of the learnt state that it was made from; empty: none")


class PolicyDecision(Message, wire="policy.decision", version=(1, 1)):
    """The orchestrator's answer on the stream: adopted or declined, always with the reason.

    `suggested`: what its own loop suggested, which is on no other subject.
    """

    module: Token
    version: str
    job: Token
    suggestion: EnvelopeId = Field(description="envelope id of the suggestion; empty: of its own loop")
    adopted: bool
    reason: str
    policy_revision: int | None = None
    suggested: PolicySuggestion | None = None


class PolicyScore(Message, wire="policy.score", version=(1, 2)):
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
    objective: JobObjective = Field(
        JobObjective.TIME, description="what its forecast names, of which it counts"
    )
    at: Time = Field(description="when it was suggested")
    step: int
    shadow: bool = Field(description="whether the module was in shadow when this was said")
    confidence: float = Field(ge=0, le=1)
    adopted: bool
    score: float | None = Field(ge=0, le=1)
    right: bool | None = Field(description="whether it was better than doing nothing")
    reason: str
    owner: Token = Field(names.MESH, description="as in the module's lifecycle")


class ModuleDrift(Message, wire="policy.drift"):
    """What a module learnt no longer fits what happens, or does again: its suggestions are less sure then.

    From the module itself, by a sequential test (ADR-0100); its lifecycle repeats it.
    """

    owner: Token = Field(names.MESH, description="as in the module's lifecycle")
    module: Token
    version: str
    drifted: bool
    reason: str = ""


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
