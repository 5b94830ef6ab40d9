"""What a service has kept: counts, files for training, erasure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response

from entities.gateway.http.context import HttpContext
from entities.gateway.http.files import DOCUMENTED, File, file_answer
from entities.gateway.http.requests import ByteRange, HttpBearer, IdempotencyKey, answer, body_of, parse
from entities.gateway.http.routes.services.records import ServiceName
from schemas.services.keeping import CollectBody, EraseBody, KeptCollection, KeptErased, KeptSummary

Number = Annotated[int, Path(ge=1, lt=1 << 31, description="of the file")]


def kept(context: HttpContext) -> APIRouter:
    """The routes below `/v1/services/{service}/kept`."""
    router = APIRouter(prefix="/v1/services/{service}/kept", tags=["kept"])
    operations = context.backflow

    @router.get("", response_model=KeptSummary)
    async def summary(service: ServiceName, bearer: HttpBearer) -> Response:
        """How many requests the service has kept, of how many users, and the files made of them."""
        return answer(await bearer.run(operations.summary(service)))

    @router.post(
        "/collections", status_code=201, response_model=KeptCollection, openapi_extra=body_of(CollectBody)
    )
    async def collect(service: ServiceName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Make a file of what is kept, which a job then names as `data.source`."""
        text = await context.body(keyed)
        operation = operations.collect(service, parse(CollectBody, text or b"{}"))
        return await context.command(
            keyed,
            bearer,
            operation,
            text,
            HTTPStatus.CREATED,
            lambda made: f"/v1/services/{service}/kept/collections/{made.number}",
        )

    @router.get("/collections/{number}", response_class=File, responses=DOCUMENTED)
    async def load(
        service: ServiceName, number: Number, bearer: HttpBearer, byte_range: ByteRange = None
    ) -> Response:
        """The file's lines of JSON: `messages`, `text`, the version that answered, the rating."""
        found = await bearer.run(operations.collection(service, number))
        folder, _, name = found.source.rpartition("/")
        return await file_answer(context.files(folder), name, byte_range)

    @router.post("/erase", response_model=KeptErased, openapi_extra=body_of(EraseBody))
    async def erase(service: ServiceName, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """Erase what is kept of a user or a subject, and the files it is in; says what was trained on it."""
        text = await context.body(keyed)
        return await context.command(keyed, bearer, operations.erase(service, parse(EraseBody, text)), text)

    return router
