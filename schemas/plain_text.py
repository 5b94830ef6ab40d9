"""Text for people: bytes in units that suit them; foreign text, safe for a terminal or a log."""

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


def shown(size: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} GiB" if size < 1000 else f"{size:,.0f} GiB"
