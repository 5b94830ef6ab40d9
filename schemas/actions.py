"""What functional modules may suggest (draft §4.2): one class per action, with the knob that it would set.

A new action needs a class here in `Action`, its knob in `knob_of`, a method of `policies.kit.policy.Policy`,
what is nonsense in `suggestion_rules`, and whoever carries it out in `membership.job_actions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from schemas.base import Part, Token
from schemas.changes import Forecast
from schemas.job_file.parallel import MOST_STAGES
from schemas.recut import MOST_REVISION, Cuts, cuts_text

MOST_IN_FLIGHT = 1024
MOST_REPLICAS = 4096
LEAST_RATE_PER_S = 0.1
"""Of each sender: a step whose microbatches come more slowly would count as stalled."""
QUEUE_ORDER, REPLICAS, RATE, CUT = "order of the queue", "replicas", "admission rate", "cut"
"""Knobs that a mesh or a job has once; those of stages and instances are named below."""


def weights_knob(stage: int) -> str:
    """The name of the knob of a stage's weights."""
    return f"weights of stage {stage}"


def route_knob(sid: str) -> str:
    """The name of the knob of whether an instance is avoided."""
    return f"route to {sid}"


def place_knob(sid: str) -> str:
    """The name of the knob of an instance's slot and stage."""
    return f"place of {sid}"


class SetWeights(Part):
    """Spread one stage's microbatches by these relative weights (SID → weight ≥ 0).

    With a forecast they are judged by it, and taken back if steps became no better.
    """

    action: Literal["set_weights"] = "set_weights"
    stage: int
    weights: dict[str, float]
    forecast: Forecast | None = None


class Detour(Part):
    """What actions have in common that send nothing to an instance while they are valid."""

    sid: Token
    forecast: Forecast | None = None


class AvoidInstance(Detour):
    """Send nothing to this instance while the suggestion is valid; with a forecast as `SetWeights`."""

    action: Literal["avoid_instance"] = "avoid_instance"


class UseBackup(Detour):
    """Send what is this instance's share to `backup` while the suggestion is valid: a path beside it.

    `backup` is of the same stage, another replica or a standby, which works for so long. Others keep their
    shares, as they don't where an instance is merely avoided. With a forecast as `SetWeights`.
    """

    action: Literal["use_backup"] = "use_backup"
    backup: Token


class MoveInstance(Part):
    """Have this instance leave its stage; its slot then hosts an instance of `stage`, with a peer's state."""

    action: Literal["move_instance"] = "move_instance"
    sid: Token
    stage: int
    forecast: Forecast


class Migrate(Part):
    """Have this instance leave its slot for another one, on `node` (an agent's SID) if that is named."""

    action: Literal["migrate"] = "migrate"
    sid: Token
    node: Token | None = None
    forecast: Forecast


class Scale(Part):
    """Give each stage so many replicas, within the job's `parallel.replicas: {min, want, max}`."""

    action: Literal["scale"] = "scale"
    replicas: int = Field(ge=1)
    forecast: Forecast


class Recut(Part):
    """Give the job's stages other layers; without `cuts` those that are best by the speeds that they show.

    `revision` is that of the plan that whoever suggests it has seen; of another one it is declined.
    """

    action: Literal["recut"] = "recut"
    cuts: Cuts | None = Field(None, max_length=MOST_STAGES, description="(first, last) layer of each stage")
    revision: int | None = Field(None, ge=0, le=MOST_REVISION)
    forecast: Forecast


class SetWindow(Part):
    """How many microbatches one sender may have open at one receiver of this stage."""

    action: Literal["set_window"] = "set_window"
    stage: int
    in_flight: int = Field(ge=1, le=MOST_IN_FLIGHT)
    forecast: Forecast


class SetRate(Part):
    """How many microbatches a second the job's data instances admit to its first stage, all together.

    It caps heat, the load of a link or power, where a window can't: instances work through a full window as
    fast as they can.
    """

    action: Literal["set_rate"] = "set_rate"
    per_s: float = Field(ge=LEAST_RATE_PER_S, le=1e6, allow_inf_nan=False)
    forecast: Forecast


class SetReduction(Part):
    """How the gradients of a stage's replicas are reduced: who adds up how much of the sum, in which order.

    `parts`: SID → relative size of the part that it adds up and finishes for all; one that is missing has 1.
    `order`: of the ring, where a stage's sum is reduced whole, as one with tied weights is. Sums are of
    integers, so that no bit depends on either.
    """

    action: Literal["set_reduction"] = "set_reduction"
    stage: int
    parts: dict[Token, float] = Field({}, max_length=MOST_REPLICAS)
    order: tuple[Token, ...] = Field((), max_length=MOST_REPLICAS)
    forecast: Forecast


class SetAlgorithm(Part):
    """By which built-in algorithm senders choose among a stage's instances (`routing.algorithm`)."""

    action: Literal["set_algorithm"] = "set_algorithm"
    algorithm: str
    forecast: Forecast


class CheckpointNow(Part):
    """Take a checkpoint at the end of the open step."""

    action: Literal["checkpoint_now"] = "checkpoint_now"


class ExpectFailures(Part):
    """Expect a failure of the job every `between_s` seconds.

    The `auto` interval between checkpoints follows from it and from their cost.
    """

    action: Literal["expect_failures"] = "expect_failures"
    between_s: float


class SetQueueOrder(Part):
    """Waiting jobs in the order in which they should start, as far as the queue's own classes allow it."""

    action: Literal["queue_order"] = "queue_order"
    jobs: tuple[Token, ...] = Field(min_length=1, max_length=256)


class RollBack(Part):
    """Give a version's traffic back to its service's stable version, and no copies to it any more.

    The suggestion is about the version's job. It is done once, and holds nothing afterwards.
    """

    action: Literal["roll_back"] = "roll_back"
    service: Token
    version: Token


class SetTraffic(Part):
    """Share a service's traffic among its versions: ten-thousandths, 10,000 in all.

    The suggestion is about the job of one of the versions. It is done once, if the service's record still has
    the revision that whoever suggests it has seen.
    """

    action: Literal["set_traffic"] = "set_traffic"
    service: Token
    weights: dict[Token, int] = Field(max_length=64)
    expected: int


class NoAction(Part):
    """An observation without a suggested action; kept on the stream, never adopted."""

    action: Literal["none"] = "none"
    note: str = ""


Action = (
    SetWeights
    | AvoidInstance
    | UseBackup
    | MoveInstance
    | Migrate
    | Scale
    | Recut
    | SetWindow
    | SetRate
    | SetReduction
    | SetAlgorithm
    | CheckpointNow
    | ExpectFailures
    | SetQueueOrder
    | RollBack
    | SetTraffic
    | NoAction
)


RouteAction = SetWeights | AvoidInstance | UseBackup
"""Those that a stage's weights follow from; they are in an account of their own (ADR-0101)."""
ServiceAction = RollBack | SetTraffic
"""Those that change a service's traffic, by compare-and-set (ADR-0151); all others are about training."""


def scope_of(action: Action) -> str:
    """The scope of an action: `stage 1`, `instance x`, the whole `job`, or the mesh's `queue`."""
    match action:
        case SetWeights(stage=stage) | SetWindow(stage=stage) | SetReduction(stage=stage):
            return f"stage {stage}"
        case Detour(sid=sid) | MoveInstance(sid=sid) | Migrate(sid=sid):
            return f"instance {sid}"
        case SetQueueOrder():
            return "queue"
        case RollBack(service=service) | SetTraffic(service=service):
            return f"service {service}"
        case _:
            return "job"


def knob_of(action: Action) -> str:
    """The one thing that the action would set; empty if it sets none. A knob has one holder at a time."""
    match action:
        case SetWeights(stage=stage):
            return weights_knob(stage)
        case Detour(sid=sid):
            return route_knob(sid)
        case MoveInstance(sid=sid) | Migrate(sid=sid):
            return place_knob(sid)
        case Scale():
            return REPLICAS
        case Recut():
            return CUT
        case SetWindow(stage=stage):
            return f"window of stage {stage}"
        case SetRate():
            return RATE
        case SetReduction(stage=stage):
            return f"reduction of stage {stage}"
        case SetAlgorithm():
            return "algorithm"
        case ExpectFailures():
            return "checkpoint interval"
        case SetQueueOrder():
            return QUEUE_ORDER
        case _:
            return ""


def forecast_of(action: Action) -> Forecast | None:
    """The forecast of a change that alters the job's speed; None: it is none."""
    return getattr(action, "forecast", None)


def value_of(action: Action) -> str:
    """What the action would set its knob to, in words."""
    match action:
        case SetWeights(weights=weights):
            return ", ".join(f"{sid} {weight:g}" for sid, weight in sorted(weights.items()))
        case AvoidInstance():
            return "avoided"
        case UseBackup(backup=backup):
            return f"by {backup}"
        case MoveInstance(stage=stage):
            return f"stage {stage}"
        case Migrate(node=node):
            return f"on {node}" if node else "another slot"
        case Scale(replicas=replicas):
            return str(replicas)
        case Recut(cuts=cuts):
            return cuts_text(cuts) if cuts else "the best one"
        case SetWindow(in_flight=in_flight):
            return f"{in_flight} in flight"
        case SetReduction(parts=parts, order=order):
            return layout_in_words(parts, order)
        case SetRate(per_s=per_s):
            return f"{per_s:g} microbatches a second"
        case SetAlgorithm(algorithm=algorithm):
            return algorithm
        case ExpectFailures(between_s=between_s):
            return f"a failure every {between_s:g} s"
        case SetQueueOrder(jobs=jobs):
            return ", ".join(jobs)
        case RollBack(version=version):
            return f"without {version}"
        case SetTraffic(weights=weights):
            return ", ".join(f"{version} {weight / 100:g} %" for version, weight in sorted(weights.items()))
        case _:
            return ""


def layout_in_words(parts: Mapping[str, float], order: Sequence[str]) -> str:
    """How a stage's sums are reduced, for people."""
    sizes = ", ".join(f"{sid} {part:g}" for sid, part in sorted(parts.items())) or "equal parts"
    return f"{sizes} in the order {', '.join(order)}" if order else sizes
