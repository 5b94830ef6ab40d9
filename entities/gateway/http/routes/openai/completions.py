"""OpenAI's models, completions and chats, and `/v1/generations/{id}/events`, which goes on with an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Header, Path, Request, Response

from bus.logs import get_logger
from bus.tasks import background
from entities.gateway.backflow.consent_rules import Said
from entities.gateway.calls.aggregated import TextBody
from entities.gateway.calls.answers import AnswerShape, whole_answer
from entities.gateway.calls.bodies import read_request
from entities.gateway.calls.calls import Allow, headers_of
from entities.gateway.calls.failures import openai_failure
from entities.gateway.generation.answer_stream import merged
from entities.gateway.generation.operations import USE, Answering
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, LastEventId, answer, body_of, named
from entities.gateway.http.sse.response import STREAM, EventStream, wait_disconnect
from entities.gateway.operations.access_client import Bearer
from entities.gateway.server_sent_events import KEEPALIVE
from schemas.base import TOKEN_PATTERN, Part
from schemas.errors import DmscError, Fenced
from schemas.services.completion import (
    ChatBody,
    ChatCompletion,
    Completion,
    CompletionBody,
    ServedModel,
    ServedModels,
)
from schemas.services.embeddings import EmbeddingsBody, TextVectors
from schemas.signals import AccessDecision

log = get_logger("door")

GenerationId = Annotated[str, Path(json_schema_extra={"pattern": TOKEN_PATTERN}), named("generation")]
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
        text = await context.body(keyed)
        body = await context.calls.decoded(len(text), read_request, CompletionBody, text)
        return await _answered(context, request, bearer, body, keyed.key, consent or "")

    @router.post("/chat/completions", response_model=ChatCompletion, openapi_extra=body_of(ChatBody))
    async def chat(
        request: Request, bearer: HttpBearer, keyed: IdempotencyKey, consent: ConsentHeader = None
    ) -> Response:
        """The next message of a conversation; with `stream` as server-sent events."""
        text = await context.body(keyed)
        body = await context.calls.decoded(len(text), read_request, ChatBody, text)
        return await _answered(context, request, bearer, body, keyed.key, consent or "")

    @router.post("/embeddings", response_model=TextVectors, openapi_extra=body_of(EmbeddingsBody))
    async def embed(request: Request, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """The vectors of texts, of models that have them; `pooled` says what they are."""
        text = await context.body(keyed)
        with context.asking(request, bearer):
            made = await unless_left(request, context.calls.embed(text, allowed_by(bearer), keyed.key))
        if made is None:
            return Response(status_code=CLIENT_LEFT)
        return answer(made, headers=headers_of(made.dmsc))

    @router.get("/generations/{id}/events", response_class=EventStream, responses=STREAM)
    async def go_on(
        id: GenerationId, request: Request, bearer: HttpBearer, last_event_id: LastEventId = None
    ) -> Response:
        """The rest of an answer whose stream broke, at any gateway, behind `Last-Event-ID`."""
        access = await bearer.check("self.read", "self")
        with context.asking(request, bearer):
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
    context: HttpContext, request: Request, bearer: Bearer, body: TextBody, key: str | None, said: Said
) -> Response:
    with context.asking(request, bearer):
        # The client may leave while its request waits for room; its sessions then end at once.
        begun = await unless_left(request, context.calls.begin(body, allowed_by(bearer), key, said))
        if begun is None:
            return Response(status_code=CLIENT_LEFT)
        if not isinstance(begun, Answering):
            return answer(begun, headers=headers_of(begun.dmsc))
        if not body.stream:
            try:
                whole = await unless_left(request, whole_answer(begun))
            finally:
                begun.cancel()
            if whole is None:
                return Response(status_code=CLIENT_LEFT)
            return answer(whole, headers=_headers(begun))
        if not await _may_begin(request, begun, context.config.events.keepalive_s):
            return Response(status_code=CLIENT_LEFT)
    return _stream(context, request, bearer, begun, 0)  # which counts it from here on


async def _may_begin(request: Request, answering: Answering, silence_s: float) -> bool:
    """Whether the client is still there when the answer may begin.

    Headers say which version answers. Where versions are compared that is told with the first token: who knew
    it before could go on with one version's slow answers alone (ADR-0150). After `silence_s` it begins all
    the same, so that the connection lives.
    """
    if not answering.is_measured:
        return True
    try:
        begun = await unless_left(request, answering.begun(silence_s))
    except BaseException:
        answering.cancel()
        raise
    if begun is None:
        answering.cancel()
    return begun is not None


def allowed_by(bearer: Bearer) -> Allow:
    """Asks the authorizer whether this bearer may use a service."""

    async def allow(service: str) -> AccessDecision:
        return await bearer.check(USE, service)

    return allow


T = TypeVar("T")


async def unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """The outcome of `work`; None if the client left before, and `work` was cancelled."""

    async def working() -> T:
        return await work

    async with background(wait_disconnect(request.receive)) as left, background(working()) as task:
        await asyncio.wait({left, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None


def _headers(answering: Answering) -> dict[str, str]:
    headers = headers_of(AnswerShape(answering).served())
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
        yield b"data: " + _json(openai_failure(error)[1]) + b"\n\n"
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
