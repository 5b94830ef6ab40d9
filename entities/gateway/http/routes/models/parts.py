"""The parameters of routes about models."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import AfterValidator

from schemas.base import DATA_SET_NAME_PATTERN
from schemas.errors import BadInput
from schemas.models.reference import ALIAS_PATTERN, is_reference, refuse_name

PREFIX = "/v1/registry"
MOST_BYTES = 1 << 20
"""Most bytes of a request's JSON: a folder's file names and a signature."""


def _model(name: str) -> str:
    refuse_name(name)
    return name


def _reference(text: str) -> str:
    if not is_reference(text):
        raise BadInput(f"version {text!r}: give a number, an alias, or 7 or more digits of a digest")
    return text


Model = Annotated[str, Path(json_schema_extra={"pattern": DATA_SET_NAME_PATTERN}), AfterValidator(_model)]
REFERENCE_PATTERN = r"^([1-9][0-9]{0,8}|[A-Za-z][A-Za-z0-9_-]{0,63}|[0-9a-f]{7,64})$"
Reference = Annotated[
    str,
    Path(
        description="a number, an alias, or 7 or more digits of a digest",
        max_length=64,
        json_schema_extra={"pattern": REFERENCE_PATTERN},
    ),
    AfterValidator(_reference),
]
Alias = Annotated[str, Path(json_schema_extra={"pattern": ALIAS_PATTERN}, max_length=64)]
At = Annotated[
    float | None,
    Query(ge=0, lt=1 << 34, description="seconds since the epoch: what each alias named then"),
]
