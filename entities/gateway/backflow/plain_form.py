"""A text as patterns read it: Unicode's look-alikes as ASCII, invisible characters away, places remembered.

Pure. Fullwidth, Arabic-Indic and circled digits are digits, every dash is a hyphen and every blank a space;
so a number is found however it is written, and what is replaced are the characters of the text itself.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_LOOK_LIKE = {
    **dict.fromkeys("。｡․·•∙⋅‧", "."),
    **dict.fromkeys("−⁻₋", "-"),
    **dict.fromkeys("\u034f\u115f\u1160\u3164\uffa0", ""),  # fillers, which are letters and show nothing
}
_VARIANTS = range(0xFE00, 0xFE10)
_OTHER_SPACES = frozenset("\t\x0b\x0c\x1c\x1d\x1e\x1f\x85")


@dataclass(frozen=True, slots=True)
class PlainForm:
    """`text`, and for each of its characters the place in the text that it is the form of; None: the same."""

    text: str
    places: Sequence[int] | None

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where in the original text the characters from `start` to before `end` (at least one) lie."""
        if self.places is None:
            return start, end
        return self.places[start], self.places[end - 1] + 1


def plain_form(text: str) -> PlainForm:
    """The form of `text` that patterns are looked for in."""
    if text.isascii():
        return PlainForm(text.replace("\t", " "), None)
    parts: list[str] = []
    places: list[int] = []
    for place, character in enumerate(text):
        form = _form(character)
        if form:
            parts.append(form)
            places.extend([place] * len(form))
    return PlainForm("".join(parts), places)


@lru_cache(maxsize=8192)
def _form(character: str) -> str:
    if character in _LOOK_LIKE:
        return _LOOK_LIKE[character]
    if character in _OTHER_SPACES:
        return " "
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category == "Cf" or ord(character) in _VARIANTS:
        return ""  # joiners, soft hyphens, direction marks
    digit = unicodedata.digit(character, None)
    if digit is not None:
        return str(digit)
    if category == "Pd":
        return "-"
    if category == "Zs":
        return " "
    if category in ("Zl", "Zp"):
        return "\n"
    return unicodedata.normalize("NFKC", character)
