"""Lists in pages (keyset pagination): a page ends with a cursor, behind which the next one begins. Pure.

A cursor names the key of the last item and no position: what is added or removed meanwhile neither repeats
an item nor passes one over.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import TypeVar

from schemas.errors import BadInput

T = TypeVar("T")
Key = tuple[str | int | float, ...]

MOST = 1000
USUAL = 100


def cut(
    items: Iterable[T], key: Callable[[T], Key], limit: int, cursor: str | None, *, descending: bool = False
) -> tuple[tuple[T, ...], str | None]:
    """The next `limit` items in the order of `key` behind `cursor`, and the cursor of what follows.

    Keys are unique, and of one shape. Raises `BadInput` for a cursor that this list did not give.
    """
    after = None if cursor is None else decode_cursor(cursor)
    ordered = sorted(items, key=key, reverse=descending)
    if after is not None:
        try:
            ordered = [one for one in ordered if (key(one) < after if descending else key(one) > after)]
        except TypeError:
            raise _unknown() from None
    page = tuple(ordered[:limit])
    return page, encode_cursor(key(page[-1])) if len(ordered) > limit else None


def encode_cursor(key: Key) -> str:
    """Opaque to clients, safe in a URL."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> Key:
    """What `encode_cursor` was given. Raises `BadInput`."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded.encode("ascii"), b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        raise _unknown() from None
    parts = found if isinstance(found, list) else []
    if not parts or not all(isinstance(part, str | int | float) for part in parts):
        raise _unknown()
    return tuple(parts)


def _unknown() -> BadInput:
    return BadInput("cursor: not one that this list gave; leave it out to begin anew")
