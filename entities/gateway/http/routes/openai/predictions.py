"""`/v1/predict`: named tensors in, named tensors out, of any model."""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from array import array
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, StringConstraints

from entities.gateway.generation.operations import USE
from entities.gateway.http.context import HttpContext
from entities.gateway.http.requests import HttpBearer, IdempotencyKey, answer, body_of, parse, read_body
from entities.gateway.http.routes.openai.completions import service_of, unless_left
from schemas.base import Part
from schemas.errors import BadInput
from schemas.services.completion import ModelName, ServedBy
from schemas.services.prediction import MOST_PREDICT_BYTES, MOST_TENSORS, NamedTensor

FLOATS = {"float32": "f", "float64": "d"}
CODES = FLOATS | {"int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}
"""Types of tensors whose values may be written as lists, with their codes in `array`."""
WIDTHS = {"float16": 2, "bfloat16": 2, "bool": 1} | {
    name: array(code).itemsize for name, code in CODES.items()
}
MOST_DEPTH = 8
MOST_LISTS = 1 << 18
"""Most lists and objects of one request: an empty one has two bytes as JSON, and some eighty in memory."""
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=120)]
MOST_BODY_BYTES = 4 * MOST_PREDICT_BYTES


class TensorValue(Part):
    """A tensor: nested lists in `values`, or little-endian bytes in base64 in `data` with a shape."""

    dtype: str | None = Field(None, description="not given: float32, or int64 where all values are whole")
    shape: tuple[int, ...] | None = Field(None, max_length=MOST_DEPTH)
    values: Any = None
    data: str | None = Field(None, description="base64")


class PredictBody(Part):
    """`POST /v1/predict`. The first dimension of each tensor counts samples."""

    model: ModelName
    inputs: Annotated[dict[TensorName, Any], Field(min_length=1, max_length=MOST_TENSORS)]
    format: str = Field("values", description="of the outputs: `values` or `base64`")


class Prediction(Part):
    model: str
    outputs: dict[str, TensorValue]
    dmsc: ServedBy


def predictions(context: HttpContext) -> APIRouter:
    """The route `/v1/predict`."""
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.post("/predict", response_model=Prediction, openapi_extra=body_of(PredictBody))
    async def predict(request: Request, bearer: HttpBearer, keyed: IdempotencyKey) -> Response:
        """What a model gives for these tensors, as nested lists, or as dtype, shape and data (base64)."""
        text = await read_body(request, MOST_BODY_BYTES)
        # Lists of a million numbers take half a second; the loop serves others meanwhile.
        body, tensors = await asyncio.to_thread(question_of, text)
        access = await bearer.check(USE, service_of(body.model))
        made = await unless_left(request, context.generations.predict(body.model, tensors, access, keyed.key))
        if made is None:
            return Response(status_code=499)
        version, predicted = made
        outputs = await asyncio.to_thread(
            lambda: {each.name: value_of(each, body.format) for each in predicted.outputs}
        )
        service = body.model.partition("@")[0]
        served = ServedBy(
            service=service,
            version=version.version,
            exact=predicted.exact,
            inexact_because=version.inexact_because,
        )
        return answer(Prediction(model=body.model, outputs=outputs, dmsc=served))

    return router


def question_of(text: bytes) -> tuple[PredictBody, list[NamedTensor]]:
    """What a request asks, with its tensors. Raises `BadInput` with the place of what is wrong."""
    if text.count(b"[") + text.count(b"{") > MOST_LISTS:
        raise BadInput(f"inputs: more than {MOST_LISTS:,} lists; give dtype, shape and data in base64")
    body = parse(PredictBody, text)
    if body.format not in ("values", "base64"):
        raise BadInput(f"format: {body.format!r} is neither values nor base64", param="format")
    tensors = [tensor_of(name, value) for name, value in body.inputs.items()]
    if (size := sum(len(each.data) for each in tensors)) > MOST_PREDICT_BYTES:
        most = MOST_PREDICT_BYTES
        raise BadInput(f"inputs: {size} bytes are above the limit of {most}; send fewer samples")
    return body, tensors


def tensor_of(name: str, value: Any) -> NamedTensor:
    """The tensor that a request's JSON stands for.

    Raises:
        BadInput: it is ragged, of another type, or its bytes do not fit its shape.
    """
    place = f"inputs.{name}"
    if isinstance(value, dict):
        unknown = sorted(value.keys() - {"dtype", "shape", "values", "data"})
        if unknown:
            raise BadInput(f"{place}: unknown key {unknown[0]}; give dtype, shape and data, or values")
        if value.get("data") is not None:
            return _of_bytes(name, place, value)
        dtype, values = value.get("dtype"), value.get("values")
    else:
        dtype, values = None, value
    flat: list[float] = []
    shape = _flatten(values, flat, place, 0)
    if dtype is None:
        dtype = "int64" if flat and all(type(each) is int for each in flat) else "float32"
    code = "B" if dtype == "bool" else CODES.get(dtype) if isinstance(dtype, str) else None
    if code is None:
        raise BadInput(f"{place}: {dtype!r} is no dtype for lists; there are {', '.join(CODES)}, bool")
    try:
        flat = [bool(each) for each in flat] if dtype == "bool" else flat
        data = array(code, [float(each) for each in flat] if code in "fd" else flat)
    except (TypeError, ValueError, OverflowError):
        raise BadInput(f"{place}: a value does not fit {dtype}") from None
    return NamedTensor(name=name, dtype=dtype, shape=shape, data=data.tobytes())


def _of_bytes(name: str, place: str, value: dict[str, Any]) -> NamedTensor:
    dtype, shape = value.get("dtype"), value.get("shape")
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise BadInput(f"{place}.dtype: {dtype!r} is none of {', '.join(WIDTHS)}")
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_DEPTH
        or any(type(n) is not int or n < 0 for n in shape)
    ):
        raise BadInput(f"{place}.shape: give up to {MOST_DEPTH} whole numbers, such as [1, 784]")
    try:
        data = base64.b64decode(value["data"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise BadInput(f"{place}.data: is no base64") from None
    due = math.prod(shape) * WIDTHS[dtype]
    if len(data) != due:
        raise BadInput(f"{place}: {len(data)} bytes, but a {dtype} tensor of {shape} has {due}")
    if dtype == "bool" and any(data.translate(None, b"\0\1")):
        raise BadInput(f"{place}.data: a bool is one byte, 0 or 1")
    return NamedTensor(name=name, dtype=dtype, shape=tuple(shape), data=data)


def _flatten(values: Any, flat: list[float], place: str, depth: int) -> tuple[int, ...]:
    if isinstance(values, bool | int | float):
        flat.append(values)
        return ()
    if not isinstance(values, list) or depth >= MOST_DEPTH:
        raise BadInput(f"{place}: give numbers in up to {MOST_DEPTH} nested lists, or dtype, shape and data")
    shapes = {_flatten(each, flat, place, depth + 1) for each in values}
    if len(shapes) > 1:
        raise BadInput(f"{place}: lists of one depth must have one length")
    return (len(values), *next(iter(shapes), ()))


def value_of(tensor: NamedTensor, form: str) -> TensorValue:
    """A tensor as JSON. Types that lists can't have, and values that JSON can't, come as base64."""
    code = CODES.get(tensor.dtype, "B" if tensor.dtype == "bool" else None)
    if form == "values" and code is not None:
        flat = array(code)
        flat.frombytes(tensor.data)
        values = flat.tolist()
        if code not in "fd" or all(map(math.isfinite, values)):
            listed = [bool(each) for each in values] if tensor.dtype == "bool" else values
            nested = _nest(listed, tensor.shape)
            return TensorValue(dtype=tensor.dtype, shape=tensor.shape, values=nested)
    text = base64.b64encode(tensor.data).decode()
    return TensorValue(dtype=tensor.dtype, shape=tensor.shape, data=text)


def _nest(flat: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return flat[0]
    for length in reversed(shape[1:]):
        flat = [flat[start : start + length] for start in range(0, len(flat), max(1, length))]
    return flat
