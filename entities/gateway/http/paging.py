"""Keyset pagination of lists: each page ends with a cursor, and the next page begins behind it. Pure.

A cursor holds the key of the page's last item, not a position: additions and removals in between neither
repeat nor skip an item.
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
    """The next `limit` items behind `cursor`, in the order of `key`, and the cursor of the next page or None.

    Keys must be unique and of one shape. Raises `BadInput` for a cursor that this list did not give.
    """
    after = None if cursor is None else decode_cursor(cursor)
    ordered = sorted(items, key=key, reverse=descending)
    if after is not None:
        try:
            ordered = [item for item in ordered if (key(item) < after if descending else key(item) > after)]
        except TypeError:
            raise _unknown() from None
    page = tuple(ordered[:limit])
    return page, encode_cursor(key(page[-1])) if len(ordered) > limit else None


def encode_cursor(key: Key) -> str:
    """The cursor for a key: opaque to clients, and safe in a URL."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> Key:
    """The key that `encode_cursor` encoded. Raises `BadInput`."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        decoded = json.loads(base64.b64decode(padded.encode("ascii"), b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        raise _unknown() from None
    parts = decoded if isinstance(decoded, list) else []
    if not parts or not all(isinstance(part, str | int | float) for part in parts):
        raise _unknown()
    return tuple(parts)


def _unknown() -> BadInput:
    return BadInput("cursor: not one that this list gave; leave it out to begin anew")
