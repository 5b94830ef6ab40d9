"""Requests about code that travels with jobs: its upload, once by content, and submissions that name it."""

from __future__ import annotations

import asyncio
from typing import Any

from dmsc.authoring.code_folder import PackedCode, pack_folder
from dmsc.client.gateway_requests import A, Gateways, OnProgress
from schemas.errors import NotFound
from schemas.job_file.code import CodeSpec
from schemas.pages import CodeArchive, CodePage

JOBS = "/v1/jobs"


class CodeCalls:
    """A part of `AsyncClient`."""

    _gateways: Gateways

    async def codes(self) -> list[CodeArchive]:
        """Your archives of code on the bus, by their digests."""
        pages = self._gateways.pages("/v1/code", CodePage)
        return [archive async for page in pages for archive in page.archives]

    async def upload_code(self, packed: PackedCode, *, progress: OnProgress | None = None) -> CodeArchive:
        """Store an archive of code, unless it is there already."""
        path = f"/v1/code/{packed.sha256}"
        try:
            return await self._gateways.ask_for(CodeArchive, "GET", path)
        except NotFound:
            answer = await self._gateways.send(path, packed.data, packed.sha256, progress)
            return CodeArchive.model_validate(answer)

    async def delete_code(self, sha256: str) -> None:
        """Remove an archive of yours. Raises `Conflict` while a job needs it, and `NotFound`."""
        await self._gateways.ask("DELETE", f"/v1/code/{sha256}")

    async def _submit_with_code(
        self,
        kind: type[A],
        path: str,
        document: dict[str, Any],
        key: str | None,
        packed: PackedCode | None = None,
    ) -> A:
        """Submit a job, an array or a build, and return what was made of it.

        Its archive may go with a job's end meanwhile; then it is sent again.
        """
        if (document.get("code") or {}).get("folder") is not None:
            code = CodeSpec.model_validate(document["code"])
            if packed is None:
                packed = await asyncio.to_thread(pack_folder, code)
            document = {**document, "code": packed.as_spec(code).model_dump(mode="json")}
        return await self._submit_packed(kind, path, document, packed, key)

    async def _submit_packed(
        self, kind: type[A], path: str, document: dict[str, Any], packed: PackedCode | None, key: str | None
    ) -> A:
        if packed is not None:
            await self.upload_code(packed)
        try:
            return await self._gateways.ask_for(kind, "POST", path, document, key=key)
        except NotFound:
            if packed is None:
                raise
        await self.upload_code(packed)
        return await self._gateways.ask_for(kind, "POST", path, document, key=key)
