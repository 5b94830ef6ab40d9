"""Feeds: named, append-only records that users push while jobs train on them (ADR-0064)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import AfterValidator

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import (
    HttpBearer,
    IdempotencyKey,
    PageAsked,
    answer,
    body_of,
    parse,
    read_body,
)
from schemas.base import TOKEN_PATTERN, is_token
from schemas.errors import Ack, BadInput
from schemas.feeds import Feed, FeedPage, FeedSpec, Pushed

FEED_BYTES = 64 << 10
_record = {"type": "object", "additionalProperties": True}
PUSH = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-ndjson": {"schema": {"type": "string", "description": "a record in each line"}},
            "application/json": {"schema": {"type": "array", "items": _record}},
        },
    }
}


def _checked_feed(name: str) -> str:
    if not is_token(name):
        raise BadInput("a feed's name has 1 to 120 letters, digits, _ or -")
    return name


FeedName = Annotated[str, Path(json_schema_extra={"pattern": TOKEN_PATTERN}), AfterValidator(_checked_feed)]


def feeds(context: HttpContext) -> APIRouter:
    """The routes below `/v1/feeds`."""
    router = APIRouter(prefix="/v1/feeds", tags=["feeds"])
    operations = context.feeds

    @router.get("", response_model=FeedPage)
    async def list_feeds(bearer: HttpBearer, page: PageAsked) -> Response:
        """The feeds, by name."""
        return page.of(FeedPage, await bearer.run(operations.each()), lambda feed: (feed.name,))

    @router.put("/{name}", status_code=201, response_model=Feed, openapi_extra=body_of(FeedSpec))
    async def create(name: FeedName, request: Request, bearer: HttpBearer) -> Response:
        """Create a feed with the fields of its records; one of yours with the same fields stays as it is."""
        spec = parse(FeedSpec, await read_body(request, FEED_BYTES))
        feed = await bearer.run(operations.create(name, spec))
        return answer(feed, HTTPStatus.CREATED, {"Location": f"/v1/feeds/{name}"})

    @router.get("/{name}", response_model=Feed)
    async def show(name: FeedName, bearer: HttpBearer) -> Response:
        """A feed: its fields, how many records it has, and whether it is closed."""
        return answer(await bearer.run(operations.show(name)))

    @router.post("/{name}/records", response_model=Pushed, openapi_extra=PUSH)
    async def push(name: FeedName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Push records: one JSON object in each line, or an array of them. All are stored, or none.

        A repetition with the same `Idempotency-Key` and body stores nothing, as long as the feed exists.
        """
        body = await read_body(keyed.request, context.config.max_push_bytes)
        return answer(await bearer.run(operations.push(name, body, keyed.key)))

    @router.post("/{name}/close", response_model=Feed)
    async def close(name: FeedName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Close a feed: it takes no more records, and jobs that train on it know its end."""
        return await context.command(keyed, bearer, operations.close(name))

    @router.delete("/{name}", response_model=Ack)
    async def delete(name: FeedName, bearer: HttpBearer) -> Response:
        """Delete a feed with its records; for operators. A job that trains on it fails."""
        return answer(await bearer.run(operations.delete(name)))

    return router
