"""What the routes have in common: the bearer's token, names in paths, bodies, pages, answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import Depends, Header, Path, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import AfterValidator, ValidationError

from entities.gateway.http.paging import MOST, USUAL
from entities.gateway.http.problems import TooLarge
from entities.gateway.operations.idempotency import Answer
from schemas.base import TOKEN_PATTERN, Part, is_token
from schemas.errors import BadInput, NotFound, Refused
from schemas.explain import explain
from schemas.pages import Page

P = TypeVar("P", bound=Part)

DISCARDED_BYTES = 4 << 20
DISCARD_S = 1.0
"""How much of a body above the limit is still read, and for how long, so that the answer arrives."""

_bearer = HTTPBearer(auto_error=False, description="a user's token, from the operator of the mesh")


async def _token(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> str:
    if given is None or not given.credentials.strip():
        raise Refused("no token; send the header Authorization: Bearer TOKEN")
    return given.credentials.strip()


Token = Annotated[str, Depends(_token)]
"""The bearer's; what it permits is asked of the AAM."""


def named(what: str) -> AfterValidator:
    """Of a path or query: 404 where it can't be a name at all."""

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
ModuleName = Annotated[str, Path(json_schema_extra=_pattern), named("module")]
CheckpointName = Annotated[str, Path(json_schema_extra=_pattern), named("checkpoint")]
UserName = Annotated[str, Path(json_schema_extra=_pattern), named("user")]
FaultId = Annotated[str, Path(json_schema_extra=_pattern), named("fault")]

WantedJob = Annotated[
    str | None, Query(json_schema_extra=_pattern, description="only of this job"), named("job")
]
WantedInstance = Annotated[
    str | None, Query(json_schema_extra=_pattern, description="only of this one"), named("instance")
]
Reason = Annotated[str, Query(max_length=200, description="is told with it")]
ByteRange = Annotated[str | None, Header(alias="Range", description="bytes=FIRST-LAST: one range")]
FirstEvent = Annotated[
    int | None, Query(ge=1, le=1 << 62, description="first sequence of the stream; default: all")
]
LastEventId = Annotated[
    str | None, Header(description="the id of the last record that came; goes before start")
]


@dataclass(frozen=True, slots=True)
class Paging:
    """Which page."""

    limit: int
    cursor: str | None


async def _paging(
    limit: Annotated[int, Query(ge=1, le=MOST, description="at most so many")] = USUAL,
    cursor: Annotated[
        str | None,
        Query(max_length=1000, description="`next` of the page before; default: from the beginning"),
    ] = None,
) -> Paging:
    return Paging(limit, cursor)


PageAsked = Annotated[Paging, Depends(_paging)]


@dataclass(frozen=True, slots=True)
class Keyed:
    """A POST's `Idempotency-Key`, and what it was sent with."""

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
    """A request's body in pieces, refused above a limit. What was stored so far is then not published."""

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
    """Bytes by what the client says, 0 where it does not; what it then sends is counted all the same.

    Raises:
        TooLarge: above `limit`.
    """
    stated = request.headers.get("content-length", "")
    length = int(stated) if stated.isdigit() else 0
    if length > limit:
        raise too_large(limit)
    return length


async def read_body(request: Request, limit: int) -> bytes:
    check_length(request, limit)
    return b"".join([piece async for piece in BoundedBody(request, limit).pieces()])


def too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is above this door's limit of {limit} bytes")


async def discard(request: Request) -> None:
    """Read a little of what is still being sent: a hang-up at once would take our answer away with it."""
    left = DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while left > 0:
                event = await request.receive()
                if event["type"] != "http.request" or not event.get("more_body", False):
                    return
                left -= len(event.get("body", b""))


def parse(kind: type[P], text: bytes, wrong: type[BadInput] = BadInput) -> P:
    """A body as the model that it is to be. Raises `wrong` with a line for each key that does not fit."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        lines = explain(error, kind)
        raise wrong(lines[0], problems="\n".join(lines)) from None


def body_of(kind: type[Part]) -> dict[str, Any]:
    """A route's `openapi_extra`: its body is this model (whose schema `api_document` adds)."""
    BODIES.add(kind)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


BODIES: set[type[Part]] = set()
"""The models of all bodies."""


# --- answers ------------------------------------------------------------------------------------------------


def answer(message: Part, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON as pydantic's core writes it."""
    return Response(message.model_dump_json(), int(status), headers, "application/json")


def paged(request: Request, page: Page) -> Response:
    """With a `Link` to the next page (RFC 8288), where there is one."""
    headers = {}
    if page.next is not None:
        query = [(key, value) for key, value in request.query_params.multi_items() if key != "cursor"]
        target = f"{request.url.path}?{urlencode([*query, ('cursor', page.next)])}"
        headers["Link"] = f'<{target}>; rel="next"'
    return answer(page, headers=headers)


def made(part: Part, location: str = "", status: int = HTTPStatus.OK) -> Answer:
    """What a POST answers, in a form that can be kept."""
    return Answer(part.model_dump_json(), int(status), location)


def sent(given: Answer) -> Response:
    headers = {"Location": given.location} if given.location else None
    return Response(given.body, given.status, headers, "application/json")


Act = Callable[[], Awaitable[Answer]]
