"""Finding where the last minutes of a stream begin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from policies.module.recent import NEAR, _search


@dataclass
class Item:
    sequence: int
    sent_at: float

    @property
    def envelope(self) -> Item:
        return self


@pytest.mark.parametrize("first", [1, 70_000])
@pytest.mark.parametrize("wanted", [-5.0, 0.0, 0.5, 40_000.0, 199_999.0, 300_000.0])
async def test_it_starts_close_before_what_is_wanted_after_few_looks(first: int, wanted: float) -> None:
    """A stream of one message a second with every third sequence taken by other subjects."""
    sequences = [first + index for index in range(200_000) if index % 3]
    looks = 0

    async def first_from(sequence: int) -> Item | None:
        nonlocal looks
        looks += 1
        index = max(0, sequence - first)
        index += index % 3 == 0
        return Item(first + index, float(index)) if index < 200_000 else None

    start = await _search(first_from, wanted)
    assert start is not None
    missed = [sequence for sequence in sequences if sequence < start and sequence - first >= wanted]
    assert missed == []
    newest_wanted = min(wanted, 200_000.0) + first
    assert newest_wanted - start <= NEAR + 3 or wanted < 0
    assert looks < 40


async def test_an_empty_stream_has_no_start() -> None:
    async def nothing(sequence: int) -> None:
        return None

    assert await _search(nothing, 0.0) is None
