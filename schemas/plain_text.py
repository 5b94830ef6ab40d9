"""Makes foreign text safe for a terminal or a log: control characters are shown as escapes."""

from __future__ import annotations


def plain(text: str, *, keep: str = "") -> str:
    """Replace unprintable characters (control characters, escapes, direction marks) by `\\x1b`, `\\u202e`.

    Letters of all scripts stay, and so do the characters in `keep`, such as line breaks.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
