"""`/v1/predict`: named tensors in, named tensors out, of any model."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from entities.gateway.calls.calls import headers_of
from entities.gateway.calls.tensor_values import PredictBody, Prediction
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, answer, body_of, read_body
from entities.gateway.http.routes.openai.completions import allowed_by, unless_left
from schemas.services.prediction import MOST_PREDICT_BYTES

MOST_BODY_BYTES = 4 * MOST_PREDICT_BYTES


def predictions(context: HttpContext) -> APIRouter:
    """The route `/v1/predict`."""
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.post("/predict", response_model=Prediction, openapi_extra=body_of(PredictBody))
    async def predict(request: Request, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """What a model gives for these tensors, as nested lists, or as dtype, shape and data (base64)."""
        text = await read_body(request, MOST_BODY_BYTES)
        with context.asking(request, bearer):
            made = await unless_left(request, context.calls.predict(text, allowed_by(bearer), keyed.key))
        if made is None:
            return Response(status_code=499)
        return answer(made, headers=headers_of(made.dmsc))

    return router
