"""Requests of the control plane to read, publish and remove files below a job's URLs.

Only nodes and the job's own instances open these URLs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Token
from schemas.marks import Secret, Url

PIECE_BYTES = 512 << 10
"""Most bytes of a file in one answer: any server accepts messages of this size."""
PAGE_NAMES = 1_000
"""Most names in one answer, which together have at most `PIECE_BYTES`."""
NAME_CHARACTERS = 1_024
PUBLISHED_BYTES = 64 << 20
"""Largest published file: a list of tens of thousands of files or hundreds of thousands of tensors."""
REMOVED_FOLDERS = 64
"""Most checkpoints in one order."""


class ReadFiles(Message, wire="cluster.files.read"):
    """MG, SMO → node agent: read below this URL. Self-contained: any node that sees the files can answer.

    `piece` returns up to `count` bytes of the file `name` from `start`, and the file's size; `list` returns
    the names that begin with `name` and come after `after`, sorted, as many as fit into one answer.
    """

    url: Url = Field(max_length=4_096)
    what: Literal["piece", "list"]
    name: str = Field("", max_length=NAME_CHARACTERS)
    start: int = Field(0, ge=0, lt=1 << 62)
    count: int = Field(0, ge=0, le=PIECE_BYTES)
    after: str = Field("", max_length=NAME_CHARACTERS)
    secrets: Secret = Field("", description="JSON: what the URL stands for, if it is a `secret://`")


class FilesRead(Message, wire="cluster.files.found"):
    """The answer: `data` and `size` (bytes, of the whole file), or `names`; with `more` there are others."""

    data: bytes = Field(b"", repr=False)
    size: int = 0
    names: tuple[str, ...] = ()
    more: bool = False


class RemoveCheckpoints(Message, wire="cluster.checkpoints.remove"):
    """SMO → node agent: remove these folders below `<artifacts>/<job>/checkpoints`. Idempotent."""

    job: Token
    artifacts: Url = Field(max_length=4_096)
    folders: tuple[Annotated[str, Field(pattern=r"^[0-9]{8,20}-[0-9]{1,20}-[0-9]{1,20}$")], ...] = Field(
        max_length=REMOVED_FOLDERS
    )
    secrets: Secret = Field("", description="JSON: what `artifacts` stands for, if it is a `secret://`")


class PublishFile(Message, wire="state.publish"):
    """SMO → one instance of the job: write this file below your job's own artifacts, with its last piece.

    Pieces come in order; publishing a file again has the same result. A manifest is written only if all files
    that it lists exist in their sizes, so that a published manifest means a complete checkpoint.
    """

    job: Token
    epoch: int
    url: Url = Field(max_length=4_096, description="the folder")
    name: str = Field(max_length=NAME_CHARACTERS)
    size: int = Field(ge=0, le=PUBLISHED_BYTES, description="of the whole file")
    sha256: str = Field(description="of the whole file")
    offset: int = Field(0, ge=0, le=PUBLISHED_BYTES)
    data: bytes = Field(b"", max_length=PIECE_BYTES, repr=False)
