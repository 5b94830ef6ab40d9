"""Batches: many requests of a file, answered unit by unit, in their order (ADR-0155, ADR-0156)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from schemas.base import Message, Part, Time, Token
from schemas.quota import Quota
from schemas.services.calls import CallPath
from schemas.signals import Role

UNIT_LINES = 64
"""Most requests of one unit, whose answers are committed together."""
UNIT_BYTES = 16 << 20
"""Bytes of requests at which a unit ends before that: a gateway has whole units in memory."""
MOST_LINES = 50_000
MOST_LINE_BYTES = 4 << 20
MOST_FILES = 10_000
"""Files of one user."""
MOST_BATCHES = 1_000
"""Batches of one user, those that are over too."""
FILES_FOLDER = "files"
"""Where the bytes lie in the bus's object store: `files/USER/FILE`."""
Metadata = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(max_length=16),
]


class StoredFile(Message, wire="service.file"):
    """A user's file. In the bucket `batches`; its bytes are an object, or those of a batch's units."""

    file: Token
    user: str
    filename: str = Field(max_length=255)
    purpose: Literal["batch", "batch_output"] = "batch"
    size_bytes: int = Field(ge=0)
    sha256: str = ""
    created_at: Time
    batch: Token | None = Field(None, description="whose output or errors it is")
    part: Literal["", "output", "errors"] = ""
    units: tuple[tuple[int, int], ...] = Field(
        (), description="of its batch: runs of units that are in it, as the first one and their number"
    )


class BatchState(StrEnum):
    IN_PROGRESS = "in_progress"
    """A gateway answers its requests, or will once it has room."""
    CANCELLING = "cancelling"
    """Its user wants it ended; what is not answered yet is not answered any more."""
    FINALIZING = "finalizing"
    """All units are committed; its files are being entered. Cancelled now, it still has all its answers."""
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """Its user's token was revoked, the quota has no room, or its gateway failed; `error` says so."""
    EXPIRED = "expired"
    """Its 24 hours are over."""


B = BatchState
BATCH_TRANSITIONS: dict[BatchState, frozenset[BatchState]] = {
    B.IN_PROGRESS: frozenset({B.CANCELLING, B.FINALIZING, B.FAILED, B.EXPIRED}),
    B.CANCELLING: frozenset({B.CANCELLED}),
    B.FINALIZING: frozenset({B.COMPLETED, B.CANCELLING, B.FAILED}),
    **{state: frozenset() for state in (B.COMPLETED, B.CANCELLED, B.FAILED, B.EXPIRED)},
}
BATCH_OVER = frozenset(state for state, next_states in BATCH_TRANSITIONS.items() if not next_states)


class BatchRecord(Message, wire="service.batch"):
    """A batch. In the bucket `batches`, written by gateways by compare-and-set; `gateway` works on it."""

    batch: Token
    request_sha256: str = Field("", description="of the request that created it, for repetitions of its key")
    user: str
    role: Role | None = None
    token_id: str = Field("", description="of the token that created it: revoked, it ends the batch")
    issued_at: Time = 0.0
    token_expires: bool = Field(False, description="whether a revocation of the user's tokens is one of it")
    quota: Quota | None = Field(None, description="the user's, as Type 3 told it")
    services: tuple[Token, ...] = Field(description="that its requests ask, all of which the user may use")
    endpoint: CallPath
    model: str = Field("", max_length=200, description="of requests that name none")
    input_file: str = Field(max_length=200, description="as the request named it")
    source: str = Field(max_length=400, description="the object with the requests")
    source_sha256: str = ""
    offsets: tuple[int, ...] = Field(
        description="byte at which each unit begins, and behind the last one, the end; none once it is over"
    )
    firsts: tuple[int, ...] = Field(description="the number of the first request of each unit, from 0")
    lines: int = Field(ge=1, le=MOST_LINES)
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata = {}
    state: BatchState = BatchState.IN_PROGRESS
    gateway: Token = Field(description="SID of the gateway that works on it")
    incarnation: Token
    error: str = ""
    completed: int = Field(0, description="requests with an answer, once it is over")
    failed: int = Field(0, description="requests with an error, once it is over")
    created_at: Time
    expires_at: Time
    cancelling_at: Time | None = None
    finalizing_at: Time | None = None
    ended_at: Time | None = None

    @property
    def units(self) -> int:
        return len(self.firsts)


class BatchUnit(Message, wire="service.batch_unit"):
    """A unit whose requests are answered. It is created once: whoever creates it decides the answers."""

    batch: Token
    unit: int = Field(ge=0)
    completed: int = Field(0, ge=0)
    failed: int = Field(0, ge=0)
    output: str = Field("", description="object with the answers' lines; empty: there are none")
    output_bytes: int = Field(0, ge=0)
    errors: str = Field("", description="object with the errors' lines; empty: there are none")
    error_bytes: int = Field(0, ge=0)
    by: Token = Field(description="SID of the gateway")


# --- OpenAI's shapes ----------------------------------------------------------------------------------------


class OpenaiFile(Part):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class OpenaiFiles(Part):
    object: Literal["list"] = "list"
    data: tuple[OpenaiFile, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(Part):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchBody(Part):
    """`POST /v1/batches`."""

    input_file_id: str = Field(
        max_length=200, description="a file's id, or a data set as bus://datasets/NAME"
    )
    endpoint: CallPath
    completion_window: Literal["24h"] = "24h"
    metadata: Metadata | None = None
    model: str = Field("", max_length=200, description="of lines that name none; not in OpenAI's API")


class BatchCounts(Part):
    total: int
    completed: int
    failed: int


class BatchError(Part):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Part):
    object: Literal["list"] = "list"
    data: tuple[BatchError, ...]


class OpenaiBatch(Part):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts
    metadata: dict[str, Any] | None = None


class OpenaiBatches(Part):
    object: Literal["list"] = "list"
    data: tuple[OpenaiBatch, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
