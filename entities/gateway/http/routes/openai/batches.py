"""OpenAI's `/v1/batches`: the requests of a file, answered into a file. Each user sees their own alone."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Response

from entities.gateway.calls.bodies import read_request
from entities.gateway.generation.operations import USE
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, answer, body_of
from entities.gateway.http.routes.openai.completions import allowed_by
from entities.gateway.http.routes.openai.files import After, Limit, page_of
from schemas.base import TOKEN_PATTERN
from schemas.services.batches import BatchBody, OpenaiBatch, OpenaiBatches

BatchId = Annotated[str, Path(max_length=200, json_schema_extra={"pattern": TOKEN_PATTERN})]


def batches(context: HttpContext) -> APIRouter:
    """The routes below `/v1/batches`."""
    router = APIRouter(prefix="/v1/batches", tags=["models"])
    operations = context.batches

    @router.post("", response_model=OpenaiBatch, openapi_extra=body_of(BatchBody))
    async def create_batch(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Have the requests of a file answered within a day, behind those of people who wait."""
        body = read_request(BatchBody, await context.body(keyed))
        access = await bearer.check(USE, "batches")

        async def may_read(data_set: str) -> object:
            return await bearer.check("dataset.read", data_set)

        with context.asking(keyed.request, bearer):  # a file of 200 MiB is read meanwhile
            made = await operations.create(body, access, allowed_by(bearer), may_read, keyed.key)
        return answer(made)

    @router.get("", response_model=OpenaiBatches)
    async def list_batches(bearer: HttpBearer, limit: Limit = 20, after: After = None) -> Response:
        """Your batches, newest first."""
        access = await bearer.check("self.read", "self")
        own = await operations.each(access)
        part, more = page_of(own, [each.batch for each in own], min(limit, 100), after)
        views = await asyncio.gather(*map(operations.view, part))
        listed = OpenaiBatches(
            data=tuple(views),
            first_id=part[0].batch if part else None,
            last_id=part[-1].batch if part else None,
            has_more=more,
        )
        return answer(listed)

    @router.get("/{batch}", response_model=OpenaiBatch)
    async def show_batch(batch: BatchId, bearer: HttpBearer) -> Response:
        """One of your batches; its counts are those of requests whose answers are decided."""
        access = await bearer.check("self.read", "self")
        return answer(await operations.show(batch, access))

    @router.post("/{batch}/cancel", response_model=OpenaiBatch)
    async def cancel_batch(batch: BatchId, bearer: HttpBearer) -> Response:
        """End a batch; what is answered so far is in its files."""
        access = await bearer.check(USE, "batches")
        return answer(await operations.cancel(batch, access))

    return router
