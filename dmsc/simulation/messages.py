"""What travels between simulated instances: the fields that the machines look at, without validation.

A microbatch takes a dozen of these; building and validating the wire's own messages would be most of the
simulator's time, and freezing these would be some of it. `as_notice` and the like tell the type checker what
the cores are typed for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.data_plane import HopLoad, MicrobatchNotice
from schemas.step import Member, MicrobatchClaim, StepVote


@dataclass(slots=True)
class SimulatedLoad:
    """What a receiver says of itself in passing; see `schemas.data_plane.HopLoad`."""

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
    round: int = 0  # of no use here: all answer a fence at the same moment


@dataclass(slots=True)
class SimulatedClaim:
    """One microbatch in an instance's sum; see `schemas.step.MicrobatchClaim`."""

    epoch: int
    step: int
    attempt: int
    microbatch: int
    stage: int
    owner: Member
    upstream: str
    loss: float = 1.0


@dataclass(slots=True)
class SimulatedVote:
    """What an instance prepared; see `schemas.step.StepVote`."""

    member: Member
    step: int
    attempt: int
    generation: int
    microbatches: tuple[int, ...]
    checksum: str = "0"
    squared_norms: tuple[float, ...] = ()


def as_load(load: SimulatedLoad) -> HopLoad:
    return load  # type: ignore[return-value]  # it looks the same to who reads it


def as_notice(notice: SimulatedNotice) -> MicrobatchNotice:
    return notice  # type: ignore[return-value]  # it looks the same to who reads it


def as_claim(claim: SimulatedClaim) -> MicrobatchClaim:
    return claim  # type: ignore[return-value]  # it looks the same to who reads it


def as_vote(vote: SimulatedVote) -> StepVote:
    return vote  # type: ignore[return-value]  # it looks the same to who reads it
