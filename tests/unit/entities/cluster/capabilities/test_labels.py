"""Labels as operators write them."""

from __future__ import annotations

import pytest

from entities.cluster.capabilities.labels import MOST_LABELS, parse_labels
from schemas.errors import BadInput


def test_labels_are_sorted_and_may_be_repeated() -> None:
    given = ["region=eu", "price=0.4", "region=eu", "note=a=b c"]
    assert parse_labels(given) == {"note": "a=b c", "price": "0.4", "region": "eu"}


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (["region"], "KEY=VALUE"),
        (["=eu"], "KEY=VALUE"),
        (["region="], "KEY=VALUE"),
        (["re gion=eu"], "KEY=VALUE"),
        (["region=e\nu"], "KEY=VALUE"),
        (["region=" + "x" * 121], "KEY=VALUE"),
        (["region=eu", "region=us"], "eu or us"),
        (["price=cheap"], "is a number"),
        (["price=-1"], "is a number"),
        (["carbon=nan"], "is a number"),
        ([f"k{number}=v" for number in range(MOST_LABELS + 1)], "at most"),
    ],
)
def test_bad_labels_are_refused_in_one_line(texts: list[str], why: str) -> None:
    with pytest.raises(BadInput, match=why) as caught:
        parse_labels(texts)
    assert "\n" not in str(caught.value)
