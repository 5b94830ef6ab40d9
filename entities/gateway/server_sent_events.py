"""The text format of server-sent events. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KEEPALIVE = b": waiting\n\n"
"""A comment, which clients ignore: it shows that the connection lives."""


def encode_event(event: str, data: str | Mapping[str, Any], sequence: int | None = None) -> bytes:
    """One event. `data` is JSON in one line, or becomes that; `sequence` is the id that a client repeats."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    head = "" if sequence is None else f"id: {sequence}\n"
    return f"{head}event: {event}\ndata: {text}\n\n".encode()
