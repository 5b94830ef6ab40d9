"""A user's own archives of code, by the SHA-256 of their bytes: list, look for, store and remove them."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import AfterValidator

from bus.logs import get_logger
from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import BYTES
from entities.gateway.http.requests import BoundedBody, HttpBearer, PageAsked, answer, check_length, discard
from entities.gateway.operations.code import archive, may_bring, owner_of_code, with_digest
from schemas.errors import Ack, BadInput, NotFound
from schemas.job_file.code import archive_name
from schemas.pages import CodeArchive, CodePage

log = get_logger("door")

PATTERN = r"^[0-9a-f]{64}$"
_digest = re.compile(PATTERN)
UPLOAD = {
    "requestBody": {"required": True, "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}
}


def _checked(digest: str) -> str:
    if not _digest.fullmatch(digest):
        raise BadInput("code is named by the SHA-256 of its archive: 64 digits 0-9 and a-f")
    return digest


Digest = Annotated[str, Path(json_schema_extra={"pattern": PATTERN}), AfterValidator(_checked)]


def code(context: HttpContext) -> APIRouter:
    """The routes below `/v1/code`."""
    router = APIRouter(prefix="/v1/code", tags=["code"])
    objects, uploads, operations = context.bus.objects, context.jobs.stored.uploads, context.jobs.code

    @router.get("", response_model=CodePage)
    async def list_archives(bearer: HttpBearer, page: PageAsked) -> Response:
        """Your archives of code, by their digests."""
        access = await bearer.check("code.read", "code")
        return page.of(CodePage, await operations.each(access.user), lambda item: (item.sha256,))

    @router.get("/{sha256}", response_model=CodeArchive)
    async def show(sha256: Digest, bearer: HttpBearer) -> Response:
        """Whether an archive of yours is stored: then it need not be sent again."""
        return answer(await bearer.run(operations.show(sha256)))

    @router.put("/{sha256}", status_code=201, response_model=CodeArchive, openapi_extra=UPLOAD)
    async def store(sha256: Digest, request: Request, bearer: HttpBearer) -> Response:
        """Store an archive (ZIP) under the SHA-256 of its bytes; a job then names it as `code.sha256`.

        One that is stored is never replaced: its bytes would be the same.
        """
        access = await may_bring(bearer, "code.write", sha256, "code")
        limit = context.config.max_code_bytes
        stated_bytes = check_length(request, limit)
        name = archive_name(owner_of_code(access.user), sha256)
        headers = {"Location": f"/v1/code/{sha256}"}
        try:
            known = await operations.find(access.user, sha256)
        except NotFound:
            pass
        else:
            await discard(request)
            return answer(archive(known), 201, headers)
        async with uploads.begin(access, name, stated_bytes, context.config.upload_hold_s) as upload:
            body = upload.within(with_digest(BoundedBody(request, limit).pieces(), sha256))
            info = await objects.put(name, body, upload.nuid)
        log.info("code stored", sha256=sha256, bytes=info.size, user=access.user)
        return answer(archive(info), 201, headers)

    @router.delete("/{sha256}", response_model=Ack)
    async def delete(sha256: Digest, bearer: HttpBearer) -> Response:
        """Remove an archive of yours that no job needs; one that a job needed goes with the job's end."""
        return answer(await bearer.run(operations.remove(sha256)))

    return router
