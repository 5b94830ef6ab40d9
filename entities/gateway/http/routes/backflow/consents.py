"""What users say about keeping their requests: consent, withdrawal, feedback."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, PageAsked, answer, body_of, parse
from entities.gateway.http.routes.services.records import ServiceName
from schemas.pages import ConsentPage
from schemas.services.keeping import ConsentBody, ConsentGiven, Feedback, FeedbackBody

SubjectAsked = Annotated[
    str | None, Query(min_length=1, max_length=200, description="one whom you serve; default: yourself")
]


def consents(context: HttpContext) -> APIRouter:
    """The routes below `/v1/consents`, and `/v1/feedback`."""
    router = APIRouter(prefix="/v1", tags=["consents"])
    operations = context.backflow

    @router.get("/consents", response_model=ConsentPage)
    async def list_consents(bearer: HttpBearer, page: PageAsked, subject: SubjectAsked = None) -> Response:
        """What you have said of keeping your requests, by service."""
        found = await bearer.run(operations.consents(subject))
        return page.of(ConsentPage, found, lambda each: (each.service,))

    @router.post("/consents/{service}/give", response_model=ConsentGiven, openapi_extra=body_of(ConsentBody))
    async def give(service: ServiceName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Have your later requests to a service kept, as its `serve.keep` says, and trained on."""
        text = await context.body(keyed)
        body = parse(ConsentBody, text or b"{}")
        return await context.command(keyed, bearer, operations.consent(service, body.subject), text)

    @router.post(
        "/consents/{service}/withdraw", response_model=ConsentGiven, openapi_extra=body_of(ConsentBody)
    )
    async def withdraw(service: ServiceName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Have nothing kept any more, and erase what is; your own word counts for all whom you serve."""
        text = await context.body(keyed)
        body = parse(ConsentBody, text or b"{}")
        return await context.command(keyed, bearer, operations.withdraw(service, body.subject), text)

    @router.post("/feedback", response_model=Feedback, openapi_extra=body_of(FeedbackBody))
    async def feedback(bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Say how good an answer was, or what a better one is, if the request was kept."""
        body = parse(FeedbackBody, await context.body(keyed))
        # Not stored for a repetition, which may be done twice: a correction lies with its item alone.
        return answer(await bearer.run(operations.feedback(body)))

    return router
