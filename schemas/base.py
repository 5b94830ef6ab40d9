"""The two base classes of everything on the wire: `Message` (has an envelope) and `Part` (lies in a message).

Both are frozen and refuse unknown fields when *we* build them. Received bodies of a newer minor
version are validated with unknown fields ignored (see `bus.wire.codec`), so that an older service keeps
working while a newer one is rolled out; a newer *major* version is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema

TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,120}$"
DATA_SET_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
SAMPLE_NAME_PATTERN = r"^[A-Za-z_]\w*$"
"""Needs a `max_length`: with `{0,119}` each field held the letters of all scripts 119 times, in 1.2 MB."""
Token = Annotated[str, StringConstraints(pattern=TOKEN_PATTERN)]
"""One subject token: a SID, a job id, a cluster name. Never contains a dot."""

LAST_TIME = 1 << 34
"""The year 2514: calendars support all times before it, and 64 bits hold them in nanoseconds."""
Time = Annotated[float, Field(ge=0, lt=LAST_TIME, allow_inf_nan=False)]
"""Seconds since the epoch."""
Seconds = Annotated[float, Field(ge=0, lt=1 << 33, allow_inf_nan=False)]
"""A duration; a present time plus a duration is a valid `Time`."""

CallerSpan = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16})?$")]
"""W3C span id of the HTTP request's caller, the parent of the job's own span; empty if there was none."""

_token = re.compile(TOKEN_PATTERN)

MESSAGE_TYPES: dict[str, type[Message]] = {}
"""Wire type name → class. Filled when a `Message` subclass is defined; wire names are literals."""


def is_token(text: str) -> bool:
    """Whether `text` may stand between two dots of a subject."""
    return _token.fullmatch(text) is not None  # `match` would take a line break at the end


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Part(BaseModel):
    """A value inside a message or a record: frozen, strict about its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Pydantic's own schema, but validating a list or map stops at its first invalid item.

        Otherwise a million invalid items would give a million errors.
        """
        schema = handler(source)
        _fail_fast(schema)
        return schema


class Message(Part):
    """A message that travels alone on a subject, inside an `Envelope`.

    Subclasses name themselves: `class Heartbeat(Message, wire="registry.heartbeat", version=(1, 0))`.
    The wire name is a literal, never derived from an import path, so that code can move.
    """

    wire_type: ClassVar[str] = ""
    wire_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init_subclass__(
        cls, *, wire: str | None = None, version: tuple[int, int] = (1, 0), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if wire is None:
            return
        known = MESSAGE_TYPES.get(wire)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise TypeError(f"wire type {wire!r} is already {known.__qualname__}")
        cls.wire_type = wire
        cls.wire_version = version
        MESSAGE_TYPES[wire] = cls
