"""Between control plane and node agents: files below a URL of a job, which nodes alone open."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import Message
from schemas.marks import Secret, Url

PIECE_BYTES = 512 << 10
"""Of a file in one answer: any server takes messages of that size."""
PAGE_NAMES = 1_000
"""Names in one answer."""
NAME_CHARACTERS = 1_024


class ReadFiles(Message, wire="cluster.files.read"):
    """MG, SMO → node agent: read below this URL. Complete in itself: any node that sees the files can answer.

    `piece` gives up to `count` bytes of the file `name` from `start`, and the file's size; `list` gives the
    names that begin with `name` and come behind `after`, sorted, as many as one answer holds.
    """

    url: Url = Field(max_length=4_096)
    what: Literal["piece", "list"]
    name: str = Field("", max_length=NAME_CHARACTERS)
    start: int = Field(0, ge=0, lt=1 << 62)
    count: int = Field(0, ge=0, le=PIECE_BYTES)
    after: str = Field("", max_length=NAME_CHARACTERS)
    secrets: Secret = Field("", description="JSON: what the URL stands for, if it is a `secret://`")


class FilesRead(Message, wire="cluster.files.found"):
    """The answer: `data` and `size` (bytes, of the whole file), or `names`; `more`: there are others."""

    data: bytes = Field(b"", repr=False)
    size: int = 0
    names: tuple[str, ...] = ()
    more: bool = False
