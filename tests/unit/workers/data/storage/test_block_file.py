"""Blocks on disk: any range comes back, any damage is found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from workers.data.storage.block_file import (
    LEAF_BYTES,
    DamagedBlock,
    block_key,
    file_bytes,
    packed,
    read_block,
)

KEY = block_key("memory://x", "etag", 100, 10, 0)
DATA = random.Random(1).randbytes(3 * LEAF_BYTES + 1234)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / KEY
    file.write_bytes(packed(KEY, DATA) + DATA)
    return file


@pytest.mark.parametrize(
    ("start", "length"),
    [(0, 1), (0, len(DATA)), (LEAF_BYTES - 1, 2), (LEAF_BYTES, LEAF_BYTES), (len(DATA) - 5, 5)],
)
def test_a_range_comes_back(path: Path, start: int, length: int) -> None:
    assert read_block(str(path), KEY, start, length, len(DATA)) == DATA[start : start + length]
    assert path.stat().st_size == file_bytes(len(DATA))


@pytest.mark.parametrize("place", [0, 9, 40, -len(DATA), -1])
def test_a_flipped_bit_is_found(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedBlock):
        read_block(str(path), KEY, 0, len(DATA), len(DATA))


@pytest.mark.parametrize("left", [0, 10, 200, len(DATA)])
def test_a_file_that_was_cut_off_is_found(path: Path, left: int) -> None:
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DamagedBlock):
        read_block(str(path), KEY, 0, len(DATA), len(DATA))


def test_a_block_under_the_key_of_another_is_damaged(path: Path) -> None:
    other = block_key("memory://x", "etag", 100, 10, 1)
    with pytest.raises(DamagedBlock):
        read_block(str(path), other, 0, 1, len(DATA))


def test_each_state_and_block_of_a_file_has_a_key_of_its_own() -> None:
    keys = {
        block_key(*facts)
        for facts in [
            ("u", "e", 9, 4, 0),
            ("v", "e", 9, 4, 0),
            ("u", "f", 9, 4, 0),
            ("u", "e", 8, 4, 0),
            ("u", "e", 9, 5, 0),
            ("u", "e", 9, 4, 1),
        ]
    }
    assert len(keys) == 6
