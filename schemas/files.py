"""Files below a URL of a job, which nodes and the job's own instances alone open: what the control plane has
them read, publish and remove."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Token
from schemas.marks import Secret, Url

PIECE_BYTES = 512 << 10
"""Of a file in one answer: any server takes messages of that size."""
PAGE_NAMES = 1_000
"""Names in one answer, at most; and as many bytes of them as a piece of a file has."""
NAME_CHARACTERS = 1_024
PUBLISHED_BYTES = 64 << 20
"""Of a list that is published: tens of thousands of files, hundreds of thousands of tensors."""
REMOVED_FOLDERS = 64
"""Checkpoints in one order."""


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


class RemoveCheckpoints(Message, wire="cluster.checkpoints.remove"):
    """SMO → node agent: remove these folders below `<artifacts>/<job>/checkpoints`. Twice is fine."""

    job: Token
    artifacts: Url = Field(max_length=4_096)
    folders: tuple[Annotated[str, Field(pattern=r"^\d{8,20}-\d{1,20}-\d{1,20}$")], ...] = Field(
        max_length=REMOVED_FOLDERS
    )
    secrets: Secret = Field("", description="JSON: what `artifacts` stands for, if it is a `secret://`")


class PublishFile(Message, wire="state.publish"):
    """SMO → one instance of the job: write this file below your job's own artifacts, with its last piece.

    Pieces come in order; the same file twice is the same file. A manifest is written only where all the files
    that it lists are there, in their sizes: whoever finds it finds a checkpoint.
    """

    job: Token
    epoch: int
    url: Url = Field(max_length=4_096, description="the folder")
    name: str = Field(max_length=NAME_CHARACTERS)
    size: int = Field(ge=0, le=PUBLISHED_BYTES, description="of the whole file")
    sha256: str = Field(description="of the whole file")
    offset: int = Field(0, ge=0, le=PUBLISHED_BYTES)
    data: bytes = Field(b"", max_length=PIECE_BYTES, repr=False)
