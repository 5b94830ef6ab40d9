"""The leader among several services of one role (orchestrators, registries): a lease with a term."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Token


class Leadership(Message, wire="mesh.leadership"):
    """The leader's claim, in the bucket `leadership`; also announced when the term begins.

    It is written only by compare-and-set. Each write is a renewal; a candidate that has observed it unchanged
    for `lease_s` by its own clock may claim the next term.
    """

    incarnation: Token
    term: int = Field(ge=1, description="grows by one with each leader; never goes back")
    lease_s: float = Field(gt=0, description="silence after which the next one may claim, in seconds")
    renewal: int = Field(0, description="how often it was renewed in this term")
    node: str = ""
    pid: int = 0
    released: bool = Field(False, description="left in order: the next one need not wait")
