"""Feeds (ADR-0064): records that users push while, or before, a job trains on them.

A feed's manifest is a row for each push, in order; the creation of a row is the compare-and-set by which the
push counts. Record i of a feed never changes, so that index → sample stays pure.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from schemas.base import Message, Part, Time, Token
from schemas.job_file.data import Dtype, SampleName, Shape
from schemas.marks import HOLDS_USER_VALUES
from schemas.pages import Page

MOST_FIELDS = 64
"""Fields of a record."""
MOST_VALUES = 1 << 20
"""Numbers of one field of a record."""
MOST_SEGMENTS = 1 << 16
"""Pushes of one feed: each is a row that whoever follows the feed holds in memory."""
PIECE_BYTES = 512 << 10
"""Most bytes of a piece, and of a record: any server accepts messages of this size."""
PUSH_BYTES = 4 << 20
"""Most bytes of a push, as they come: they are checked value by value."""

_short = re.compile(r"^([a-z0-9]+)(?:\[([0-9, ]*)\])?$")


class FeedField(Part):
    """What a field of each record holds: a text, or a tensor. Short: `text`, `int64`, `float32[3,32,32]`."""

    dtype: Literal["text"] | Dtype = Field(description="text, or the type of a tensor")
    shape: Shape = Field((), description="sizes of the tensor's dimensions; none: a number")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        found = _short.fullmatch(value.strip())
        if found is None:
            raise ValueError(f"{value[:60]!r} is no type; write text, int64, or float32[3,32,32]")
        sizes = [size for size in (found[2] or "").replace(" ", "").split(",") if size]
        return {"dtype": found[1], "shape": [int(size[:20]) for size in sizes]}

    @model_validator(mode="after")
    def _is_small(self) -> FeedField:
        if self.dtype == "text" and self.shape:
            raise ValueError("a text has no shape")
        if math.prod(self.shape) > MOST_VALUES:
            raise ValueError(f"a field has at most {MOST_VALUES:,} numbers")
        return self

    def __str__(self) -> str:
        return self.dtype + (f"[{','.join(map(str, self.shape))}]" if self.shape else "")


Fields = Annotated[dict[SampleName, FeedField], Field(min_length=1, max_length=MOST_FIELDS)]


class FeedSpec(Part):
    """The body of `PUT /v1/feeds/NAME`: what each record has. Fixed for the feed's life."""

    fields: Fields = Field(description="field → text, or a type with a shape, as in float32[3,32,32]")


class FeedRecord(Message, wire="feed.record"):
    """A feed, as it was created. `uid` tells it from others that had, or will have, its name."""

    name: Token
    uid: Token
    user: str
    fields: dict[SampleName, FeedField]
    created_at: Time


class FeedPiece(Part):
    """Some records in a row: lines of JSON, whose SHA-256 is their name."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    records: int = Field(ge=1)
    size_bytes: int = Field(ge=1)


class FeedSegment(Message, wire="feed.segment"):
    """One push, or the end of a feed. `number` counts both from 0; `first` is its first record's index.

    `push` recognises a repeated push. `stored_bytes` is of the feed up to and with this segment.
    """

    uid: Token
    number: int = Field(ge=0, le=MOST_SEGMENTS + 1)
    first: int = Field(ge=0, lt=1 << 62)
    pieces: tuple[FeedPiece, ...] = ()
    stored_bytes: int = Field(0, ge=0)
    push: Token
    at: Time
    end: Literal["", "closed", "removed"] = ""

    @property
    def records(self) -> int:
        return sum(piece.records for piece in self.pieces)

    @property
    def after(self) -> int:
        """The index of the record behind its last one."""
        return self.first + self.records


class FeedPieceData(Message, wire="feed.piece"):
    """The bytes of a piece."""

    data: Annotated[bytes, HOLDS_USER_VALUES] = Field(max_length=PIECE_BYTES, repr=False)


class Feed(Part):
    """A feed as it is now."""

    name: Token
    user: str
    fields: Fields
    records: int = Field(ge=0)
    pushes: int = Field(ge=0)
    stored_bytes: int = Field(ge=0)
    closed: bool
    created_at: Time
    changed_at: Time


class FeedPage(Page):
    """Feeds in order of name."""

    feeds: tuple[Feed, ...]


class Pushed(Part):
    """The answer to a push: its records are those from `first` on, for ever."""

    feed: Token
    push: int = Field(ge=0, description="its number in the feed")
    first: int = Field(ge=0)
    records: int = Field(ge=0)


# --- what a job waits for -----------------------------------------------------------------------------------
Standing = Literal["there", "waits", "over"]


def records_needed(position: int, window: int) -> int:
    """Records that a feed has to have before the sample at `position` - 1 may be drawn."""
    return position if window < 2 else -(-position // window) * window


def standing(position: int, window: int, count: int, *, closed: bool, stops: bool) -> Standing:
    """Whether the samples before `position` of a job in the order of arrival are there.

    Args:
        position: Behind the last sample of a step, counted from the job's first.
        window: See `data.shuffle_window`.
        count: Records of the feed.
        closed: Whether no more will come.
        stops: Whether the job ends with the feed; else it goes on with the feed's next epoch.
    """
    if not closed:
        return "there" if count >= records_needed(position, window) else "waits"
    if count >= position or (count and not stops):
        return "there"
    return "over"
