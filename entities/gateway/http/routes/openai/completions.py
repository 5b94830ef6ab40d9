"""OpenAI's models, completions and chats, and `/v1/generations/{id}/events`, which goes on with an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Header, Path, Request, Response

from bus.logs import get_logger
from bus.tasks import background
from entities.gateway.generation.answer_stream import merged
from entities.gateway.generation.operations import USE, Answering
from entities.gateway.http.context import HttpContext
from entities.gateway.http.problems import openai_error, status_of
from entities.gateway.http.request_facts import RequestFacts
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, LastEventId, answer, body_of, named
from entities.gateway.http.routes.openai.answers import AnswerShape, WholeAnswer
from entities.gateway.http.routes.openai.bodies import read_body
from entities.gateway.http.sse.response import STREAM, EventStream, wait_disconnect
from entities.gateway.operations.access_client import Bearer
from entities.gateway.server_sent_events import KEEPALIVE
from schemas.base import TOKEN_PATTERN, Part
from schemas.errors import BadInput, DmscError, Fenced, NotFound, Unavailable
from schemas.services.completion import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    SampledBody,
    ServedModel,
    ServedModels,
)
from schemas.signals import AccessDecision

log = get_logger("door")

B = TypeVar("B", bound=SampledBody)
GenerationId = Annotated[str, Path(json_schema_extra={"pattern": TOKEN_PATTERN}), named("generation")]
Begin = Callable[[B, AccessDecision, str | None], Awaitable[Answering]]
ConsentHeader = Annotated[
    Literal["train", "none"] | None,
    Header(
        alias="dmsc-consent",
        description="`train`: this request may be kept and trained on, if its service keeps requests; "
        "`none`: it may not, whatever was said before",
    ),
]
KEPT_UNTIL = "dmsc-kept-until"
"""The header that says until when this request is kept; without it nothing is."""
GENERATION = "dmsc-generation"
"""The header with the id under which any gateway goes on with an answer."""
DONE = b"data: [DONE]\n\n"
CLOSING = b"retry: 200\n: this gateway stops; another one goes on\n\n"
CLIENT_LEFT = 499


def completions(context: HttpContext) -> APIRouter:
    """OpenAI's routes."""
    router = APIRouter(prefix="/v1", tags=["models"])
    operations = context.generations

    @router.get("/models", response_model=ServedModels)
    async def list_served_models(bearer: HttpBearer) -> Response:
        """The model services, and their versions as SERVICE@VERSION."""
        await bearer.check("service.read", "services")
        return answer(ServedModels(data=operations.models()))

    @router.get("/models/{model}", response_model=ServedModel)
    async def read_model(model: Annotated[str, Path(max_length=200)], bearer: HttpBearer) -> Response:
        """One of them."""
        await bearer.check("service.read", model.partition("@")[0])
        return answer(operations.model(model))

    @router.post("/completions", response_model=Completion, openapi_extra=body_of(CompletionBody))
    async def complete(
        request: Request, bearer: HttpBearer, keyed: IdempotencyKey, consent: ConsentHeader = None
    ) -> Response:
        """What comes after a prompt; with `stream` as server-sent events."""
        body = read_body(CompletionBody, await context.body(keyed))
        begin = partial(operations.complete, said=consent or "")
        return await _answered(context, request, bearer, body, begin, keyed.key)

    @router.post("/chat/completions", response_model=ChatCompletion, openapi_extra=body_of(ChatBody))
    async def chat(
        request: Request, bearer: HttpBearer, keyed: IdempotencyKey, consent: ConsentHeader = None
    ) -> Response:
        """The next message of a conversation; with `stream` as server-sent events."""
        body = read_body(ChatBody, await context.body(keyed))
        begin = partial(operations.chat, said=consent or "")
        return await _answered(context, request, bearer, body, begin, keyed.key)

    @router.post("/embeddings", include_in_schema=False)
    async def embed(bearer: HttpBearer) -> Response:
        await bearer.check("self.read", "self")
        text = "embeddings are not supported yet; a model's own outputs are at /v1/predict"
        raise BadInput(text, reason="unsupported_endpoint")

    @router.get("/generations/{id}/events", response_class=EventStream, responses=STREAM)
    async def go_on(
        id: GenerationId, request: Request, bearer: HttpBearer, last_event_id: LastEventId = None
    ) -> Response:
        """The rest of an answer whose stream broke, at any gateway, behind `Last-Event-ID`."""
        access = await bearer.check("self.read", "self")
        answering = await operations.resume(id, access)
        try:
            await bearer.check(USE, answering.service.service)
        except BaseException:
            answering.cancel()
            raise
        after = (
            int(last_event_id[:9])
            if last_event_id and last_event_id.isascii() and last_event_id.isdigit()
            else 0
        )
        return _stream(context, request, bearer, answering, after)

    return router


async def _answered(
    context: HttpContext, request: Request, bearer: Bearer, body: B, begin: Begin[B], key: str | None
) -> Response:
    access = await bearer.check(USE, service_of(body.model))
    # The client may leave while its request waits for room; its sessions then end at once.
    answering = await unless_left(request, begin(body, access, key))
    if answering is None:
        return Response(status_code=CLIENT_LEFT)
    if body.stream:
        return _stream(context, request, bearer, answering, 0)
    facts: RequestFacts = request.scope["dmsc"]
    facts.identity = f"user {access.user}"
    try:
        with context.hub.admitted(facts.identity):
            facts.leave()
            whole = await unless_left(request, _whole(answering))
    finally:
        answering.cancel()
    if whole is None:
        return Response(status_code=CLIENT_LEFT)
    return answer(whole, headers=_headers(answering))


def service_of(model: str) -> str:
    """The name to check rights for. A text that no service can have is refused as an unknown model."""
    service = model.partition("@")[0]
    if not service or not service.replace("-", "").replace("_", "").isalnum() or not service.isascii():
        raise NotFound(f"the model {model!r} does not exist", reason="model_not_found", param="model")
    return service


T = TypeVar("T")


async def unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """The outcome of `work`; None if the client left before, and `work` was cancelled."""

    async def working() -> T:
        return await work

    async with background(wait_disconnect(request.receive)) as left, background(working()) as task:
        await asyncio.wait({left, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None


async def _whole(answering: Answering) -> Completion | ChatCompletion:
    shape = AnswerShape(answering)
    answers = [WholeAnswer() for _ in answering.sessions]
    try:
        async for index, piece in merged(answering):
            answers[index].add(piece)
    except Fenced as error:
        raise Unavailable(f"{error.text}; ask again", retry_after_s=1.0) from None
    return shape.whole(answers)


def _headers(answering: Answering) -> dict[str, str]:
    version = answering.version
    headers = {
        "dmsc-answered-by": f"{answering.service.service}@{version.version}",
        "dmsc-exact": "true" if version.exact else "false",
    }
    keep = answering.first.keep
    if keep is not None:
        ends = datetime.fromtimestamp(answering.first.began, UTC) + timedelta(days=keep.days)
        headers[KEPT_UNTIL] = ends.isoformat(timespec="seconds")
    if len(answering.sessions) == 1:
        headers[GENERATION] = answering.first.id
    return headers


def _stream(
    context: HttpContext, request: Request, bearer: Bearer, answering: Answering, after: int
) -> EventStream:
    """The answer as server-sent events, which are numbered by tokens where there is one answer alone."""
    pieces = _with_keepalive(_events(answering, after), context.config.events.keepalive_s)
    try:
        return context.stream(
            request,
            bearer,
            USE,
            answering.service.service,
            pieces,
            own_headers=_headers(answering),
            over=answering.cancel,
        )
    except BaseException:
        answering.cancel()
        raise


async def _events(answering: Answering, after: int) -> AsyncGenerator[bytes, None]:
    shape = AnswerShape(answering)
    is_numbered = len(answering.sessions) == 1
    counts = [0] * len(answering.sessions)
    if not after:
        for index in range(len(counts)):
            if (role := shape.role(index)) is not None:
                yield _event(role)
    try:
        async for index, piece in merged(answering):
            counts[index] = piece.number
            if piece.number > after or piece.ends:
                yield _event(shape.piece(index, piece), piece.number if is_numbered else None)
    except Fenced:
        yield CLOSING
        return
    except DmscError as error:
        log.info("an answer failed", generation=answering.first.id, code=error.code)
        code = str(error.fields.get("reason", "")) or error.code
        yield b"data: " + _json(openai_error(status_of(error), error.text, code)) + b"\n\n"
        return
    if shape.with_usage:
        yield _event(shape.last(sum(counts)))
    yield DONE


def _event(message: Part, number: int | None = None) -> bytes:
    head = "" if number is None else f"id: {number}\n"
    return f"{head}data: {message.model_dump_json()}\n\n".encode()


def _json(document: dict[str, object]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


async def _with_keepalive(pieces: AsyncGenerator[bytes, None], every_s: float) -> AsyncGenerator[bytes, None]:
    """The pieces, with a comment whenever none has come for `every_s`."""
    following: asyncio.Task[bytes] | None = None
    try:
        while True:
            if following is None:
                following = asyncio.ensure_future(anext(pieces))
            done, _ = await asyncio.wait({following}, timeout=every_s)
            if not done:
                yield KEEPALIVE
                continue
            task, following = following, None
            try:
                yield task.result()
            except StopAsyncIteration:
                return
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await pieces.aclose()
