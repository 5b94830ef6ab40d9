"""Labels of a node as operators write them: `region=eu`, `price=0.4` (draft §4.3 Type 1). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from schemas.accounts import CARBON_LABEL, PRICE_LABEL
from schemas.base import is_token
from schemas.errors import BadInput

MOST_LABELS = 32
NUMERIC = (PRICE_LABEL, CARBON_LABEL)
"""Labels that plans calculate with: price of a slot per hour, grams of CO2 per kWh."""


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """`KEY=VALUE` of each text, sorted by key.

    Raises:
        BadInput: one is no label, a key stands twice with different values, or there are too many.
    """
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not is_token(key) or not 0 < len(value) <= 120 or not value.isprintable():
            raise BadInput(
                f"label {text!r}: write it as KEY=VALUE, the key of letters, digits, _ and -, "
                "the value of 1 to 120 characters: region=eu"
            )
        if labels.setdefault(key, value) != value:
            raise BadInput(f"label {key}: {labels[key]} or {value}? Give it once")
        if key in NUMERIC and not _is_amount(value):
            raise BadInput(f"label {text}: {key} is a number that is not negative: {key}=0.4")
    if len(labels) > MOST_LABELS:
        raise BadInput(f"{len(labels)} labels: a node has {MOST_LABELS} at most")
    return dict(sorted(labels.items()))


def _is_amount(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return isfinite(value) and value >= 0
