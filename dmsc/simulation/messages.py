"""The messages between simulated instances: only the fields that the machines read, without validation.

A microbatch takes a dozen of them. Building and validating real messages would be most of the simulator's
time, and frozen classes would cost some of it. `as_notice` and the like convert to the types that the cores
declare, for the type checker only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.data_plane import HopLoad, MicrobatchNotice
from schemas.step import Member, MicrobatchClaim, StepVote


@dataclass(slots=True)
class SimulatedLoad:
    """The load that a receiver reports with its messages; see `schemas.data_plane.HopLoad`."""

    open: int
    service_ms: float


@dataclass(slots=True)
class SimulatedNotice:
    """An offer of one microbatch; see `schemas.data_plane.MicrobatchNotice`."""

    epoch: int
    step: int
    attempt: int
    microbatch: int
    direction: Literal["forward", "backward"]
    sender: Member
    receiver: Member
    load: SimulatedLoad | None = None
    evaluate: bool = False
    round: int = 0  # unused, because all instances answer a fence at the same time here
    replaced: int = 0


@dataclass(slots=True)
class SimulatedClaim:
    """The claim of one microbatch in an instance's sum; see `schemas.step.MicrobatchClaim`."""

    epoch: int
    step: int
    attempt: int
    microbatch: int
    stage: int
    owner: Member
    upstream: str
    loss: float = 1.0
    weight: float = 1.0
    replaced: int = 0


@dataclass(slots=True)
class SimulatedVote:
    """The vote of a prepared instance; see `schemas.step.StepVote`."""

    member: Member
    step: int
    attempt: int
    generation: int
    microbatches: tuple[int, ...]
    checksum: str = "0"
    squared_norms: tuple[float, ...] = ()
    learning_rate: float | None = None
    tied: tuple[tuple[int, str], ...] = ()
    loss_scale: float | None = None
    overflowed: tuple[int, ...] = ()


def as_load(load: SimulatedLoad) -> HopLoad:
    return load  # type: ignore[return-value]  # it has all fields that the cores read


def as_notice(notice: SimulatedNotice) -> MicrobatchNotice:
    return notice  # type: ignore[return-value]  # it has all fields that the cores read


def as_claim(claim: SimulatedClaim) -> MicrobatchClaim:
    return claim  # type: ignore[return-value]  # it has all fields that the cores read


def as_vote(vote: SimulatedVote) -> StepVote:
    return vote  # type: ignore[return-value]  # it has all fields that the cores read
