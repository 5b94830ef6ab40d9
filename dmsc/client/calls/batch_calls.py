"""Batches of requests to model services, and the files that they read and write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from dmsc.client import http_protocol
from dmsc.client.calls.access_calls import segment
from dmsc.client.gateway_requests import Gateways, OnProgress
from schemas.services.batches import OpenaiBatch, OpenaiBatches, OpenaiFile, OpenaiFiles

OVER = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchCalls:
    """A part of `AsyncClient`. OpenAI's own client works at the same gateways."""

    _gateways: Gateways

    async def upload_file(self, source: Path | bytes, *, name: str = "requests.jsonl") -> OpenaiFile:
        """Store a file with a request in each line. Raises `OverQuota` if there is no room for it."""
        name = name if isinstance(source, bytes) else source.name
        answer = await self._gateways.post_file("/v1/files", source, name, {"purpose": "batch"})
        return OpenaiFile.model_validate(answer)

    async def files(self) -> list[OpenaiFile]:
        """Your files of requests and answers, newest first."""
        return list((await self._gateways.ask_for(OpenaiFiles, "GET", "/v1/files")).data)

    async def download_file(self, file: str, target: Path, *, progress: OnProgress | None = None) -> Path:
        """Fetch a file of yours into `target`, which appears only when it is complete."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with http_protocol.partial_file(target) as partial:
            await self._gateways.fetch(f"/v1/files/{segment(file)}/content", partial, target.name, progress)
        return target

    async def delete_file(self, file: str) -> None:
        """Remove a file of yours. Raises `Conflict` while a batch needs it."""
        await self._gateways.ask("DELETE", f"/v1/files/{segment(file)}")

    async def create_batch(
        self,
        source: str,
        *,
        endpoint: str = "/v1/completions",
        model: str = "",
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> OpenaiBatch:
        """Have all requests of a file answered, in the background and within a day.

        Args:
            source: A file's id, or a data set as `bus://datasets/NAME`.
            endpoint: The path of all requests.
            model: The service of requests that name none.

        Raises:
            BadInput: the file has no request, or two under one `custom_id`.
        """
        body = {
            "input_file_id": source,
            "endpoint": endpoint,
            "completion_window": "24h",
            "model": model,
            "metadata": None if metadata is None else dict(metadata),
        }
        return await self._gateways.ask_for(OpenaiBatch, "POST", "/v1/batches", body, key=idempotency_key)

    async def batch(self, batch: str) -> OpenaiBatch:
        """A batch of yours as it is now. Raises `NotFound`."""
        return await self._gateways.ask_for(OpenaiBatch, "GET", f"/v1/batches/{segment(batch)}")

    async def batches(self) -> list[OpenaiBatch]:
        """The last 100 of your batches, newest first."""
        listed = await self._gateways.ask_for(OpenaiBatches, "GET", "/v1/batches", params={"limit": 100})
        return list(listed.data)

    async def cancel_batch(self, batch: str) -> OpenaiBatch:
        """End a batch; what is answered so far stays. Raises `Conflict` if it is over."""
        return await self._gateways.ask_for(OpenaiBatch, "POST", f"/v1/batches/{segment(batch)}/cancel")

    async def wait_for_batch(
        self, batch: str, *, poll_s: float = 1.0, progress: Callable[[OpenaiBatch], None] = lambda _: None
    ) -> OpenaiBatch:
        """Wait until a batch is over; a failed one raises nothing: see `status`. `progress`: at each look."""
        while True:
            found = await self.batch(batch)
            progress(found)
            if found.status in OVER:
                return found
            await asyncio.sleep(poll_s)
