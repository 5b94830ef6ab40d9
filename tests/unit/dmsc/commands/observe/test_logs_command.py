"""Times as `dmsc logs --since` takes them."""

from __future__ import annotations

import pytest

from dmsc.commands.observe.logs import parse_since
from schemas.errors import BadInput


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", 999_970.0),
        ("1.5m", 999_910.0),
        ("2h", 992_800.0),
        ("1d", 913_600.0),
        ("1970-01-01T01:00:00+00:00", 3_600.0),
    ],
)
def test_ago_and_iso(text: str, expected: float) -> None:
    assert parse_since(text, 1_000_000.0) == expected


@pytest.mark.parametrize("text", ["", "soon", "5", "-5m", "5w"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(BadInput, match="write 30s, 5m, 2h, 1d"):
        parse_since(text, 0.0)
