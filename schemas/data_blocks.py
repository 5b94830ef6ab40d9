"""Blocks of remote data that data instances of a job get from each other's nodes (ADR-0048)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schemas.base import Message, Token
from schemas.step import Member

BlockKey = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""The name of a block of one state of a file; it is also the name of a file, so it has nothing but digits."""
MOST_KEYS = 1024
"""Of one message."""
MOST_BLOCK_BYTES = 64 << 20


class BlocksKept(Message, wire="data.blocks.kept"):
    """MI → the other data instances of its job: these blocks lie in the cache of my node.

    A block may go at any time, and nobody says so. `asks`: tell me what you have.
    """

    job: Token
    member: Member
    node: str = Field(
        description="its node agent, whose instances share a cache and ask each other for nothing"
    )
    keys: tuple[BlockKey, ...] = Field((), max_length=MOST_KEYS)
    asks: bool = False


class BlockSend(Message, wire="data.block.send"):
    """MI → MI: send me this block. It comes as direction `block` over a tensor link: its file, as it is.

    Answered by `NotFound`, if it has gone, or `Unavailable`, if too many are being sent.
    """

    job: Token
    key: BlockKey
    bytes: int = Field(ge=1, le=MOST_BLOCK_BYTES, description="of its data")
    to: Member
    transfer: int = Field(ge=0, description="the asker's number of this request")
