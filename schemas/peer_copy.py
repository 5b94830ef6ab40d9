"""Copies of a stage's state at a peer: their holders, and restoring a lost stage (DESIGN §5 rule 9)."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Token
from schemas.step import Member


class CopyTo(Message, wire="state.copy.to"):
    """SMO → MI: keep a copy of your state at `holder` from now on; None: keep none.

    The copy is sent while training goes on. Idempotent; the former holder drops its copy.
    """

    job: Token
    epoch: int
    holder: Member | None = None


class CopyStatus(Message, wire="state.copy.status"):
    """SMO → MI: which version does your copy of this stage reach?"""

    job: Token
    epoch: int
    stage: int


class CopyHeld(Message, wire="state.copy.held"):
    """A holder's answer: its snapshot and the steps after it reach `version`; -1: it has no copy."""

    member: Member
    stage: int
    version: int = Field(-1, description="steps applied: the next step's number")


class CopySend(Message, wire="state.copy.send"):
    """SMO → holder: send this newcomer the copy of its stage, which has to reach exactly `version`.

    The snapshot goes as direction `state`, each step after it as direction `redo`. Answered by
    `StateReady`, or `Conflict` if the copy reaches another version.
    """

    job: Token
    epoch: int
    stage: int
    to: Member
    version: int
    transfer: int = Field(0, ge=0, description="as in `StateSend`")
