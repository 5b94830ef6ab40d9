"""What a step's members tell the orchestrator and one another."""

from __future__ import annotations

from typing import Any

from schemas.data_plane import MicrobatchNotice
from schemas.step import Member, MicrobatchClaim, StepCommit, StepVote


def member(sid: str = "j-s0-r0", incarnation: str = "i1") -> Member:
    return Member(sid=sid, incarnation=incarnation)


def claim(microbatch: int = 0, owner: Member | str = "j-s0-r0", **more: Any) -> MicrobatchClaim:
    """A microbatch of step 3 that is in the sum of its owner, in stage 0."""
    fields = {
        "job": "j",
        "epoch": 1,
        "step": 3,
        "attempt": 0,
        "stage": 0,
        "upstream": "d",
        "owner": member(owner) if isinstance(owner, str) else owner,
    }
    return MicrobatchClaim(microbatch=microbatch, **(fields | more))


def notice(sender: Member, receiver: Member, **more: Any) -> MicrobatchNotice:
    """Tensors of microbatch 0 of step 0, on their way forward to stage 1."""
    fields = {
        "job": "j",
        "epoch": 1,
        "step": 0,
        "attempt": 0,
        "microbatch": 0,
        "stage": 1,
        "direction": "forward",
        "link": "l",
        "tag": 0,
        "tensors": (),
    }
    return MicrobatchNotice(sender=sender, receiver=receiver, **(fields | more))


def commit(step: int = 0, **more: Any) -> StepCommit:
    """The order to apply a step."""
    fields = {
        "job": "j",
        "epoch": 1,
        "attempt": 0,
        "generation": 0,
        "checksum": "",
        "clip": 1.0,
        "action": "apply",
    }
    return StepCommit(step=step, **(fields | more))


def vote(member: Member, **more: Any) -> StepVote:
    """That its sum of step 0 is ready."""
    fields = {"step": 0, "attempt": 0, "generation": 0, "checksum": "c", "squared_norms": (1.0,)}
    return StepVote(member=member, **(fields | more))
