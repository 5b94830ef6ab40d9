"""What a schema says of its own fields beyond their types: which are secret, which name another message.

    token: Secret
    source: Url = "stdlib:"

Whoever shows or records messages goes by these marks (`schemas.redaction`), not by the look of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass(frozen=True, slots=True)
class Mark:
    """Stands in a field's `Annotated`; validation passes over it."""

    name: str


SECRET = Mark("secret")
"""The value opens something: a bearer token, a password. Of type `str` or `bytes`."""

HOLDS_URL = Mark("holds URL")
"""A URL that may carry credentials: its user part and its query's values are secret."""

HOLDS_USER_VALUES = Mark("holds user values")
"""A map that a user (or a service's caller) fills as they like: texts under a name that says password, token,
secret, credential or key are secret."""

REFERS = Mark("refers")
"""The id of an envelope that this message is about: it is one of the causes of this one."""

Secret = Annotated[str, Field(repr=False), SECRET]
"""A bearer token or password: never in a repr, `***` in taps and recorded files."""

Url = Annotated[str, HOLDS_URL]
"""Of an artifact, a dataset, a checkpoint: credentials in it are shown as `***`."""

EnvelopeId = Annotated[str, REFERS]
"""Which message this one is about; empty: none."""
