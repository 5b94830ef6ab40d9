"""Who leads, where several of one kind may run (orchestrators, registries): a lease with a term."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Token


class Leadership(Message, wire="mesh.leadership"):
    """The leader's claim, as it stands in the bucket `leadership` and is announced when it begins.

    Written by compare-and-set only. Each write is a renewal; whoever has seen it stand unchanged for
    `lease_s` by their own clock may claim the next term.
    """

    incarnation: Token
    term: int = Field(ge=1, description="grows by one with each leader; never goes back")
    lease_s: float = Field(gt=0, description="silence after which the next one may claim, in seconds")
    renewal: int = Field(0, description="how often it was renewed in this term")
    node: str = ""
    pid: int = 0
    released: bool = Field(False, description="left in order: the next one need not wait")
