"""Marks on a schema's fields beyond their types: which are secret, and which name another message.

    token: Secret
    source: Url = "stdlib:"

Code that shows or records messages uses these marks (`schemas.redaction`), not the look of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark in a field's `Annotated`; validation ignores it."""

    name: str


SECRET = Mark("secret")
"""The value gives access: a bearer token, a password. Of type `str` or `bytes`."""

HOLDS_URL = Mark("holds URL")
"""A URL that may have credentials: its user part and its query's values are secret."""

HOLDS_USER_VALUES = Mark("holds user values")
"""A map with content of a user (or a service's caller): texts under a name that says password, token, secret,
credential or key are secret."""

PRIVATE = Mark("private")
"""What a user asked or was answered: prompts, tokens, tensors. Its shape stays, with nothing in it."""

REFERS = Mark("refers")
"""The id of an envelope that this message is about: it is one of the causes of this one."""

Secret = Annotated[str, Field(repr=False), SECRET]
"""A bearer token or password: never in a repr, `***` in taps and recorded files."""

Url = Annotated[str, HOLDS_URL]
"""The URL of an artifact, a dataset or a checkpoint: credentials in it are shown as `***`."""

EnvelopeId = Annotated[str, REFERS]
"""The id of the message that this one is about; empty if there is none."""
