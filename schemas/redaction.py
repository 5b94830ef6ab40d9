"""Hides the secrets in a message's body that its schema marks (`schemas.marks`): each becomes `***`.

Of what a user asked or was answered, the shape stays: numbers become 0, and texts `***`.

It works on plain values, so a body that does not fit its schema is redacted as well. If a part has another
shape than the schema says, and the schema has secrets in it, the whole part is hidden.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from schemas.marks import HOLDS_URL, HOLDS_USER_VALUES, PRIVATE, REFERS, SECRET

HIDDEN = "***"
"""Replaces a secret."""

Mask = Callable[[Any], Any]

_secret_name = re.compile(
    r"(^|[_\W])(token|passw(or)?d|passphrase|secret|credentials?|(api|access|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
_user_part = re.compile(r"(?<!dataset://)(?<!model://)(?<=://)[^/?#@]*@")  # NAME@VERSION has none
_query_value = re.compile(r"(?<==)[^&#]+")


def names_secret(key: str) -> bool:
    """Whether a value of this name counts as a secret."""
    return _secret_name.search(key) is not None


def redact(cls: type[BaseModel], body: Any) -> Any:
    """The `body` of a message of type `cls` without its secrets; a body without secrets is unchanged."""
    masks = masks_of(cls)
    if not masks:
        return body
    if not isinstance(body, Mapping):
        return _hide(body)
    changed = {name: mask(body[name]) for name, mask in masks.items() if name in body}
    return {**body, **changed}


@cache
def masks_of(cls: type[BaseModel]) -> dict[str, Mask]:
    """The mask of each field of `cls` that may have secrets, at any depth; empty if there are none."""
    return _masks(cls, ())


def references(cls: type[BaseModel], message: BaseModel) -> list[str]:
    """The ids of the envelopes that a message is about (`marks.REFERS`)."""
    return [found for name in _referring(cls) if (found := getattr(message, name))]


@cache
def _referring(cls: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, field in cls.model_fields.items() if REFERS in field.metadata)


def _masks(cls: type[BaseModel], outer: tuple[type[BaseModel], ...]) -> dict[str, Mask]:
    """The masks of a model's fields. `outer` has the models around it, as a model may contain itself."""
    found = {}
    for name, field in cls.model_fields.items():
        mask = _mask_of(field.annotation, field.metadata, (*outer, cls))
        if mask is not None:
            found[name] = mask
    return found


def _mask_of(kind: Any, marks: Iterable[Any], outer: tuple[type[BaseModel], ...]) -> Mask | None:
    for mark, its_mask in (
        (SECRET, _hide),
        (PRIVATE, _hide_content),
        (HOLDS_URL, _hide_in_url),
        (HOLDS_USER_VALUES, _hide_named),
    ):
        if mark in marks:
            return its_mask
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _mask_of(args[0], args[1:], outer)
    if origin in (Union, types.UnionType):
        members = [mask for arg in args if (mask := _mask_of(arg, (), outer)) is not None]
        return _all_of(members) if members else None
    if isinstance(origin, type) and args:
        inner = _mask_of(args[0 if args[-1] is Ellipsis else -1], (), outer)
        if inner is None:
            return None
        return _each_value(inner) if issubclass(origin, Mapping) else _each(inner)
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    if is_model and (kind in outer or _masks(kind, outer)):
        return lambda value: redact(kind, value)
    return None


def _all_of(masks: list[Mask]) -> Mask:
    """The mask of a union: hides the secrets of every member. Plain values stay unless they are secret."""

    def mask(value: Any) -> Any:
        for one in masks:
            if isinstance(value, Mapping | list | tuple) or one in (_hide, _hide_content, _hide_in_url):
                value = one(value)
        return value

    return mask


def _each(mask: Mask) -> Mask:
    return lambda value: [mask(one) for one in value] if isinstance(value, list | tuple) else _hide(value)


def _each_value(mask: Mask) -> Mask:
    return lambda value: (
        {key: mask(one) for key, one in value.items()} if isinstance(value, Mapping) else _hide(value)
    )


def _hide(value: Any) -> Any:
    """Hide a value. None stays None: the absence of a secret is not secret."""
    if value is None:
        return None
    return HIDDEN.encode() if isinstance(value, bytes) else HIDDEN


def _hide_content(value: Any) -> Any:
    """Hide texts and numbers at any depth. Their number stays, so that the body still fits its schema."""
    if isinstance(value, Mapping):
        return {key: _hide_content(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_hide_content(one) for one in value]
    if isinstance(value, bool | int | float):
        return type(value)()
    return _hide(value) if value else value


def _hide_in_url(value: Any) -> Any:
    if isinstance(value, Mapping):  # of what may also be written as a URL alone
        return {key: _hide_in_url(one) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    address, question, query = value.partition("?")
    return _user_part.sub(f"{HIDDEN}@", address) + question + _query_value.sub(HIDDEN, query)


def _hide_named(value: Any) -> Any:
    """Hide values in a user's map whose names say that they are secret, at any depth, and URL credentials."""
    if isinstance(value, Mapping):
        return {
            key: _hide(one)
            if isinstance(one, str | bytes) and _secret_name.search(str(key))
            else _hide_named(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide_named(one) for one in value]
    return _user_part.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value
