"""Tensors of `/v1/predict` as JSON, and back (ADR-0148). Pure; without numpy."""

from __future__ import annotations

import base64
import binascii
import math
from array import array
from typing import Annotated, Any

from pydantic import Field, StringConstraints, ValidationError

from entities.gateway.calls.json_bounds import check_elements
from schemas.aggregation import Aggregation
from schemas.base import Part
from schemas.errors import BadInput
from schemas.explain import explain
from schemas.services.completion import ModelName, ServedBy
from schemas.services.prediction import MOST_PREDICT_BYTES, MOST_TENSORS, NamedTensor

FLOATS = {"float32": "f", "float64": "d"}
CODES = FLOATS | {"int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}
"""Types of tensors whose values may be written as lists, with their codes in `array`."""
WIDTHS = {"float16": 2, "bfloat16": 2, "bool": 1} | {
    name: array(code).itemsize for name, code in CODES.items()
}
MOST_DEPTH = 8
TensorName = Annotated[str, StringConstraints(min_length=1, max_length=120)]


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
    aggregation: Aggregation | None = Field(
        None, description="`first`, `vote`, `weighted` or `attention`: several are asked"
    )


class Prediction(Part):
    model: str
    outputs: dict[str, TensorValue]
    dmsc: ServedBy


def question_of(text: bytes) -> tuple[PredictBody, list[NamedTensor]]:
    """What a request asks, with its tensors. Raises `BadInput` with the place of what is wrong."""
    check_elements(text)
    try:
        body = PredictBody.model_validate_json(text)
    except ValidationError as error:
        lines = explain(error, PredictBody)
        raise BadInput(lines[0], problems="\n".join(lines)) from None
    if body.format not in ("values", "base64"):
        raise BadInput(f"format: {body.format[:60]!r} is neither values nor base64", param="format")
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
            raise BadInput(f"{place}: unknown key {unknown[0][:60]}; give dtype, shape and data, or values")
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
        known = ", ".join(CODES)
        raise BadInput(f"{place}: {repr(dtype)[:60]} is no dtype for lists; there are {known}, bool")
    try:
        flat = [bool(each) for each in flat] if dtype == "bool" else flat
        data = array(code, [float(each) for each in flat] if code in "fd" else flat)
    except (TypeError, ValueError, OverflowError):
        raise BadInput(f"{place}: a value does not fit {dtype}") from None
    return NamedTensor(name=name, dtype=dtype, shape=shape, data=data.tobytes())


def _of_bytes(name: str, place: str, value: dict[str, Any]) -> NamedTensor:
    dtype, shape = value.get("dtype"), value.get("shape")
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise BadInput(f"{place}.dtype: {repr(dtype)[:60]} is none of {', '.join(WIDTHS)}")
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
    if math.prod(max(1, n) for n in shape) > MOST_PREDICT_BYTES:  # also beside a 0: no library has such
        raise BadInput(f"{place}.shape: {shape} is above the limit of {MOST_PREDICT_BYTES} bytes")
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
