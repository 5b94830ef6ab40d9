"""What the routes share: the bearer's token, names in paths, bodies, pages and answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import Depends, Header, Path, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import AfterValidator, ValidationError

from entities.gateway.http.paging import MOST, USUAL, Key, T, cut
from entities.gateway.http.problems import TooLarge
from entities.gateway.http.request_facts import RequestFacts
from entities.gateway.operations.access_client import Bearer
from entities.gateway.operations.idempotency import Answer
from schemas.base import TOKEN_PATTERN, Part, is_token
from schemas.errors import BadInput, NotFound, Refused
from schemas.explain import explain
from schemas.pages import Page

P = TypeVar("P", bound=Part)

_bearer = HTTPBearer(auto_error=False, description="a user's token, from the operator of the mesh")


async def _bearer_of(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Bearer:
    if credentials is None or not credentials.credentials.strip():
        raise Refused("no token; send the header Authorization: Bearer TOKEN")
    return Bearer(credentials.credentials.strip(), request.app.state.access_client)


HttpBearer = Annotated[Bearer, Depends(_bearer_of)]
"""Whoever sent the request. The AAM decides what the bearer's token permits."""


def named(what: str) -> AfterValidator:
    """A validator for a name in a path or query; a text that can't be a name gives 404."""

    def check(name: str | None) -> str | None:
        if name is not None and not is_token(name):
            raise NotFound(f"there is no such {what}; a name has only letters, digits, _ and -")
        return name

    return AfterValidator(check)


_pattern = {"pattern": TOKEN_PATTERN}
JobId = Annotated[str, Path(json_schema_extra=_pattern), named("job")]
InstanceId = Annotated[str, Path(json_schema_extra=_pattern), named("instance")]
ClusterName = Annotated[str, Path(json_schema_extra=_pattern), named("cluster")]
NodeName = Annotated[str, Path(json_schema_extra=_pattern), named("node")]
PoolName = Annotated[str, Path(json_schema_extra=_pattern), named("pool")]
MachineName = Annotated[str, Path(json_schema_extra=_pattern), named("machine")]
ModuleName = Annotated[str, Path(json_schema_extra=_pattern), named("module")]
CheckpointName = Annotated[str, Path(json_schema_extra=_pattern), named("checkpoint")]
UserName = Annotated[str, Path(json_schema_extra=_pattern), named("user")]
FaultId = Annotated[str, Path(json_schema_extra=_pattern), named("fault")]

WantedJob = Annotated[
    str | None, Query(json_schema_extra=_pattern, description="only of this job"), named("job")
]
WantedInstance = Annotated[
    str | None, Query(json_schema_extra=_pattern, description="only of this instance"), named("instance")
]
Reason = Annotated[str, Query(max_length=200, description="is recorded with the action")]
ByteRange = Annotated[str | None, Header(alias="Range", description="bytes=FIRST-LAST: one range")]
FirstEvent = Annotated[
    int | None, Query(ge=1, le=1 << 62, description="first sequence of the stream; default: all")
]
LastEventId = Annotated[
    str | None, Header(description="the id of the last record that came; goes before start")
]


@dataclass(frozen=True, slots=True)
class Paging:
    """The requested page of a list: its size, and the cursor behind which it begins."""

    request: Request
    limit: int
    cursor: str | None

    def of(
        self, kind: type[Page], items: Iterable[T], key: Callable[[T], Key], *, descending: bool = False
    ) -> Response:
        """The answer with this page of the items, in the order of `key`.

        `kind` has one field beside `next`, which holds the items.
        """
        part, following = cut(items, key, self.limit, self.cursor, descending=descending)
        (name,) = kind.model_fields.keys() - {"next"}
        return self.answer(kind.model_validate({name: part, "next": following}))

    def answer(self, page: Page) -> Response:
        """The answer with the page, and a `Link` to the next one (RFC 8288) where there is one."""
        headers = {}
        if page.next is not None:
            query = [
                (key, value) for key, value in self.request.query_params.multi_items() if key != "cursor"
            ]
            target = f"{self.request.url.path}?{urlencode([*query, ('cursor', page.next)])}"
            headers["Link"] = f'<{target}>; rel="next"'
        return answer(page, headers=headers)


async def _paging(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MOST, description="at most so many")] = USUAL,
    cursor: Annotated[
        str | None,
        Query(max_length=1000, description="`next` of the page before; default: from the beginning"),
    ] = None,
) -> Paging:
    return Paging(request, limit, cursor)


PageAsked = Annotated[Paging, Depends(_paging)]


@dataclass(frozen=True, slots=True)
class Keyed:
    """A POST's `Idempotency-Key`, and the request that it came with."""

    key: str | None
    request: Request


async def _keyed(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=200,
            pattern=r"^[\x21-\x7e]+$",
            description="chosen by the client: a repetition with the same key and body does nothing twice "
            "and gets the first one's answer, for a day, at every gateway",
        ),
    ] = None,
) -> Keyed:
    return Keyed(idempotency_key, request)


IdempotencyKey = Annotated[Keyed, Depends(_keyed)]


# --- bodies -------------------------------------------------------------------------------------------------


class BoundedBody:
    """A request's body in pieces, up to a limit. Above it the reader fails, so that nothing is published."""

    def __init__(self, request: Request, limit: int) -> None:
        self._request = request
        self._limit = limit
        self.bytes = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._request.stream():
            self.bytes += len(piece)
            if self.bytes > self._limit:
                raise too_large(self._limit)
            if piece:
                yield piece


def check_length(request: Request, limit: int) -> int:
    """The body's length in bytes as the client states it, 0 where it states none.

    The bytes that really come are counted all the same (`BoundedBody`).

    Raises:
        TooLarge: the stated length is above `limit`.
    """
    stated = request.headers.get("content-length", "")
    length = int(stated) if stated.isdigit() else 0
    if length > limit:
        raise too_large(limit)
    return length


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, which counts as the identity's until the answer is over.

    Raises:
        TooLarge: it is above `limit`.
        RateLimited, Overloaded: bodies of requests under way take too much memory.
    """
    check_length(request, limit)
    facts: RequestFacts = request.scope["dmsc"]
    pieces = []
    async for piece in BoundedBody(request, limit).pieces():
        facts.keep(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is above this door's limit of {limit} bytes")


async def discard(request: Request, most_bytes: int = 4 << 20, most_s: float = 1.0) -> None:
    """Reads some of what the client still sends: closing the connection at once would lose our answer."""
    left = most_bytes
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            while left > 0:
                event = await request.receive()
                if event["type"] != "http.request" or not event.get("more_body", False):
                    return
                left -= len(event.get("body", b""))


def parse(kind: type[P], text: bytes, wrong: type[BadInput] = BadInput) -> P:
    """Parses a body into its model. Raises `wrong` with a line for each key that does not fit."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        lines = explain(error, kind)
        raise wrong(lines[0], problems="\n".join(lines)) from None


def body_of(kind: type[Part]) -> dict[str, Any]:
    """A route's `openapi_extra`, which names the body's model; `api_document` adds the model's schema."""
    BODIES.add(kind)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


BODIES: set[type[Part]] = set()
"""The models of all bodies."""


# --- answers ------------------------------------------------------------------------------------------------


def answer(message: Part, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer with the message as JSON, serialized by pydantic itself."""
    return Response(message.model_dump_json(), int(status), headers, "application/json")


def sent(reply: Answer) -> Response:
    headers = {"Location": reply.location} if reply.location else None
    return Response(reply.body, reply.status, headers, "application/json")
