"""Bounds of a body's JSON, counted before it is decoded. Pure.

A body of 16 MiB may stand for gigabytes: `[]` has two bytes as JSON, and some eighty in memory.
"""

from __future__ import annotations

from schemas.errors import BadInput

MOST_LISTS = 1 << 18
"""Most lists and objects of one body."""
MOST_ELEMENTS = 1 << 21
"""Most lists, objects and values of one body: twice as many as the largest tensor of float32 has."""


def check_elements(text: bytes) -> None:
    """Counts what opens or parts lists and objects; those within texts count too.

    Raises:
        BadInput: there are more than a gateway decodes.
    """
    lists = text.count(b"[") + text.count(b"{")
    if lists > MOST_LISTS:
        raise BadInput(f"the body has more than {MOST_LISTS:,} lists and objects; {_INSTEAD}")
    if lists + text.count(b",") > MOST_ELEMENTS:
        raise BadInput(f"the body has more than {MOST_ELEMENTS:,} values; {_INSTEAD}")


_INSTEAD = "send less, or tensors as dtype, shape and data in base64"
