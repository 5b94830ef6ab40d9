"""Reads stored values that were valid by the rules of an earlier version.

A user's values are checked once, when they are submitted. The rules may become stricter from version to
version; a record written before stays valid, and its job goes on unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from schemas.base import Part

_RULES = frozenset(
    {
        "assertion_error",
        "finite_number",
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "literal_error",
        "string_pattern_mismatch",
        "string_too_long",
        "string_too_short",
        "too_long",
        "too_short",
        "value_error",
    }
)
"""Pydantic's names of errors in a value that has the right type."""


P = TypeVar("P", bound=Part)


def read_stored(value: Any, model: type[P]) -> P:
    """Reads a stored `value` as a `model`, including values that may no longer be submitted.

    Args:
        value: a mapping from field names to values as on the wire, or a `model`. Unknown names are ignored.
        model: the class.

    Raises:
        ValidationError: a field is missing, or has the wrong type.
    """
    try:
        return model.model_validate(value, extra="ignore")
    except ValidationError as error:
        fields = model.model_fields
        whole = isinstance(value, Mapping) and all(
            name in value for name, field in fields.items() if field.is_required()
        )
        if not whole or not breaks_rules(error):
            raise
    known = {name: _read_field(value[name], fields[name]) for name in value if name in fields}
    record: Any = model.model_construct(**known)
    return cast(P, record)


def breaks_rules(error: ValidationError) -> bool:
    """Whether any of the errors is about a value of the right type."""
    return any(
        problem["type"] in _RULES for problem in error.errors(include_url=False, include_context=False)
    )


def _read_field(value: Any, field: FieldInfo) -> Any:
    part = _part_of(field.annotation)
    if part is not None and isinstance(value, Mapping):
        return read_stored(value, part)
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        if not breaks_rules(error):
            raise
    return tuple(value) if isinstance(value, list) else value


def _part_of(annotation: Any) -> type[Part] | None:
    """The `Part` class in a field's annotation, alone or in a union; None if there is none."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return next((part for part in map(_part_of, get_args(annotation)) if part is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Part) else None
