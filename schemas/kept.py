"""Reads what was kept under the rules of its own time.

Which values a user may submit is judged once, when they are submitted. Rules grow narrower from version to
version; a record that was written before is no garbage for that, and its job goes on as it began.
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
"""pydantic's names of what is wrong with a value of the right type."""


P = TypeVar("P", bound=Part)


def kept(value: Any, model: type[P]) -> P:
    """`value` as a `model`, whose fields hold what was kept even where it may not be submitted any more.

    Args:
        value: a mapping of field names to what is on the wire, or a `model`. Names that are not known are
            left out.

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
    known = {name: _kept(value[name], fields[name]) for name in value if name in fields}
    made: Any = model.model_construct(**known)
    return cast(P, made)


def breaks_rules(error: ValidationError) -> bool:
    """Whether a value of the right type is among what does not fit."""
    return any(one["type"] in _RULES for one in error.errors(include_url=False, include_context=False))


def _kept(value: Any, field: FieldInfo) -> Any:
    part = _part_of(field.annotation)
    if part is not None and isinstance(value, Mapping):
        return kept(value, part)
    annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        if not breaks_rules(error):
            raise
    return tuple(value) if isinstance(value, list) else value


def _part_of(annotation: Any) -> type[Part] | None:
    """The one of ours that a field holds, alone or as a choice."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return next((part for part in map(_part_of, get_args(annotation)) if part is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Part) else None
