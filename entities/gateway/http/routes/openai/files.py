"""OpenAI's `/v1/files`: files of requests, and of batches' answers. Each user sees their own alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Query, Request, Response

from entities.gateway.batches.batch_rules import file_view
from entities.gateway.generation.operations import USE
from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import BYTES, DOCUMENTED, File
from entities.gateway.http.requests import (
    BoundedBody,
    HttpBearer,
    IdempotencyKey,
    answer,
    check_length,
)
from entities.gateway.http.routes.openai.multipart import UploadForm, boundary_of
from schemas.base import TOKEN_PATTERN
from schemas.errors import BadInput
from schemas.services.batches import FileDeleted, OpenaiFile, OpenaiFiles, StoredFile

_parts = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
    },
}
FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _parts}}}}
FileId = Annotated[str, Path(max_length=200, json_schema_extra={"pattern": TOKEN_PATTERN})]
Limit = Annotated[int, Query(ge=1, le=10_000, description="at most so many")]
After = Annotated[str | None, Query(max_length=200, description="behind this one")]
T = TypeVar("T")


def files(context: HttpContext) -> APIRouter:
    """The routes below `/v1/files`."""
    router = APIRouter(prefix="/v1/files", tags=["models"])
    operations = context.batches

    @router.post("", response_model=OpenaiFile, openapi_extra=FORM)
    async def store_file(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Store a file with a request in each line, for a batch."""
        request = keyed.request
        access = await bearer.check(USE, "files")
        limit = context.config.max_file_bytes
        stated_bytes = check_length(request, limit)
        form = UploadForm(boundary_of(request.headers.get("content-type", "")))
        pieces = _content(request, form, limit)
        first = await anext(pieces, b"")  # the fields before the file, and its name
        if "purpose" in form.fields:
            _check_purpose(form.fields["purpose"])
        record = await operations.store(
            access, form.filename or "file.jsonl", _behind(first, pieces), stated_bytes, keyed.key
        )
        return answer(file_view(record))

    @router.get("", response_model=OpenaiFiles)
    async def list_files(
        bearer: HttpBearer,
        purpose: Annotated[str | None, Query(max_length=100)] = None,
        limit: Limit = 10_000,
        after: After = None,
    ) -> Response:
        """Your files, newest first."""
        access = await bearer.check("self.read", "self")
        own = [each for each in await operations.files.each(access.user) if purpose in (None, each.purpose)]
        part, more = page_of(own, [each.file for each in own], limit, after)
        listed = OpenaiFiles(
            data=tuple(map(file_view, part)),
            first_id=part[0].file if part else None,
            last_id=part[-1].file if part else None,
            has_more=more,
        )
        return answer(listed)

    @router.get("/{file}", response_model=OpenaiFile)
    async def show_file(file: FileId, bearer: HttpBearer) -> Response:
        """One of your files."""
        access = await bearer.check("self.read", "self")
        return answer(file_view(await operations.files.get(file, access.user)))

    @router.get("/{file}/content", response_class=File, responses=DOCUMENTED)
    async def read_file(file: FileId, bearer: HttpBearer) -> Response:
        """Its bytes."""
        access = await bearer.check("self.read", "self")
        record = await operations.files.get(file, access.user)
        return _file_answer(record, operations.files.content(record))

    @router.delete("/{file}", response_model=FileDeleted)
    async def delete_file(file: FileId, bearer: HttpBearer) -> Response:
        """Remove a file of yours; one that an open batch needs stays."""
        access = await bearer.check(USE, "files")
        await operations.delete_file(file, access)
        return answer(FileDeleted(id=file))

    return router


async def _content(request: Request, form: UploadForm, limit: int) -> AsyncIterator[bytes]:
    """The bytes of the form's file."""
    async for piece in BoundedBody(request, limit).pieces():
        found = form.feed(piece)
        if found:
            yield found
    form.end()
    _check_purpose(form.fields.get("purpose"))


def _check_purpose(purpose: str | None) -> None:
    if purpose is None:
        raise BadInput("purpose: the form has none; it is batch", reason="invalid_value", param="purpose")
    if purpose != "batch":
        raise BadInput(
            f"purpose: {purpose[:60]!r} is not supported; the one that is is batch",
            reason="unsupported_parameter",
            param="purpose",
        )


async def _behind(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in pieces:
        yield piece


def _file_answer(record: StoredFile, content: AsyncIterator[bytes]) -> Response:
    name = record.filename.encode("ascii", "replace").decode().replace('"', "'").replace("\\", "/")
    headers = {
        "Content-Length": str(record.size_bytes),
        "Content-Disposition": f'attachment; filename="{"".join(filter(str.isprintable, name))}"',
    }
    return File(content, 200, headers, BYTES)


def page_of(
    items: Sequence[T], ids: Sequence[str], limit: int, after: str | None
) -> tuple[Sequence[T], bool]:
    """The part of a list behind `after`, and whether there is more behind it.

    Raises:
        BadInput: `after` is none of them.
    """
    first = 0
    if after is not None:
        if after not in ids:
            raise BadInput(f"after: {after[:100]!r} is none of the listed ids", param="after")
        first = ids.index(after) + 1
    return items[first : first + limit], len(items) > first + limit
