"""Text of others on its way to a terminal or a log: what would steer either is shown as what it is."""

from __future__ import annotations


def plain(text: str, *, keep: str = "") -> str:
    """Whatever has no sign of its own (control characters, escapes, marks that turn the direction of writing)
    as `\\x1b`, `\\u202e`. `keep`: stays as it is, for texts that have lines of their own.

    Letters of all scripts stay.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
