"""`/v1/aggregate`: several calls of model services in one request, and one answer with all of theirs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request, Response

from bus.logs import get_logger
from entities.gateway.calls.calls import Allow
from entities.gateway.calls.failures import openai_failure
from entities.gateway.calls.json_bounds import check_elements
from entities.gateway.http.context import HttpContext
from entities.gateway.http.request_facts import RequestFacts
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, answer, body_of, parse, read_body
from entities.gateway.http.routes.openai.completions import allowed_by, unless_left
from entities.gateway.http.routes.openai.predictions import MOST_BODY_BYTES
from schemas.errors import DeadlineExceeded, DmscError, RateLimited
from schemas.services.calls import CallAnswered, CallsAnswered, CallsBody, ServiceCall

log = get_logger("door")


def several_calls(context: HttpContext) -> APIRouter:
    """The route `/v1/aggregate`."""
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.post("/aggregate", response_model=CallsAnswered, openapi_extra=body_of(CallsBody))
    async def aggregate(request: Request, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Up to 16 calls at once; each has its own rights, charge, status and body, and fails no other."""
        await bearer.check("self.read", "self")
        text = await read_body(request, MOST_BODY_BYTES)
        with context.asking(request, bearer):
            body = await context.calls.decoded(len(text), _calls_of, text)
            calls = _Calls(context, request.scope["dmsc"], allowed_by(bearer), keyed.key)
            answers = await unless_left(request, calls.answered(body, len(text)))
        if answers is None:
            return Response(status_code=499)
        failed = sum(each.status >= 400 for each in answers)
        return answer(CallsAnswered(answers=answers, failed=failed))

    return router


def _calls_of(text: bytes) -> CallsBody:
    check_elements(text)
    return parse(CallsBody, text)


class _Calls:
    """The calls of one request."""

    def __init__(self, context: HttpContext, facts: RequestFacts, allow: Allow, key: str | None) -> None:
        self._context, self._facts, self._allow, self._key = context, facts, allow, key

    async def answered(self, body: CallsBody, size: int) -> tuple[CallAnswered, ...]:
        """`size`: bytes of all calls together."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._one(number, call, body.wait_s, size))
                for number, call in enumerate(body.calls)
            ]
        return tuple(task.result() for task in tasks)

    async def _one(self, number: int, call: ServiceCall, wait_s: float, size: int) -> CallAnswered:
        try:
            if number and not self._facts.charge():  # the request itself was the first one's charge
                raise RateLimited("more calls than requests that you may send at once", retry_after_s=1.0)
            key = None if self._key is None else f"{self._key}/{number}"
            calls = self._context.calls
            with self._context.hub.admitted(self._facts.identity):
                async with asyncio.timeout(wait_s):
                    text = await calls.decoded(size, _text_of, call.body)
                    made = await calls.answer(call.path, text, self._allow, key)
        except TimeoutError:
            late = DeadlineExceeded(f"no answer within {wait_s:g} s: raise wait_s, or ask for less")
            return _failed(call, late)
        except DmscError as error:
            return _failed(call, error)
        except Exception as error:  # a defect in one call must not lose the others' answers
            log.error("a call failed", path=call.path, exc_info=error)
            return _failed(call, DmscError("the gateway failed; its log says why"))
        return CallAnswered(id=call.id, status=200, body=made.model_dump(mode="json"))


def _text_of(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def _failed(call: ServiceCall, error: DmscError) -> CallAnswered:
    status, body = openai_failure(error)
    more: dict[str, Any] = {}
    if "retry_after_s" in error.fields:
        more["retry_after_s"] = float(error.fields["retry_after_s"])
    return CallAnswered(id=call.id, status=int(status), body=body | more)
