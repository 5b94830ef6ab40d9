"""Durations as people write and read them: `--expires 14d`, `36 s`."""

from __future__ import annotations

import pytest

from dmsc.console.durations import in_units, parse_duration
from schemas.errors import BadInput


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28_800), ("30min", 1_800), ("30m", 1_800), ("14d", 1_209_600), ("90s", 90), ("1.5 h", 5_400)],
)
def test_a_duration(text: str, seconds: float) -> None:
    assert parse_duration(text, "--expires") == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "h",
        "-1h",
        "0s",
        "0.0d",
        "8 hours",
        "1e3s",
        "٣h",
        "36501d",
        "100000000d",
        "9" * 400 + "s",
    ],
)
def test_a_duration_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(BadInput, match=r"--expires .*write it as 90s, 30m, 8h or 14d"):
        parse_duration(text, "--expires")


def test_none_at_all_only_where_that_is_something() -> None:
    assert parse_duration("0s", "--grace", zero=True) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.3642, "0.364 s"), (99, "99 s"), (150, "2.5 min"), (43_200, "12 h"), (9e6, "2,500 h")],
)
def test_a_duration_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert in_units(seconds) == text
