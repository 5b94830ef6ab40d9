"""Weights by pieces: the same digests as of whole files, and one line for what is none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bus.files.artifacts import open_artifacts
from dmsc.client.weights_check import tensor_lines
from entities.model_records.weights_reading import read_weights
from schemas.errors import BadData, BadInput
from tests.builders.models import shard


class Pieces:
    """A folder of one file that comes in pieces of one size."""

    url = "pieces://"

    def __init__(self, data: bytes, size: int) -> None:
        self._data, self._size = data, size

    async def open_range(self, name: str) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), self._size):
            yield self._data[start : start + self._size]


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
async def test_pieces_of_any_size_give_the_digests_of_the_whole(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.safetensors").write_bytes(shard(1))
    read = await read_weights(Pieces(shard(1), size), ["a.safetensors"])  # type: ignore[arg-type]
    assert read.tensors == tensor_lines(tmp_path / "a.safetensors")
    assert read.weights_bytes == 2 * 32 * 8 * 4


def _with(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "too early"),
        (shard(1)[:-1], "too early"),
        (shard(1) + b"x", "too late"),
        (b"\xff" * 64, "header would be too long"),
        (_with([1], b""), "not a safetensors file"),
        (_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "leave a gap"),
        (
            _with({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, bytes(4)),
            "overlap",
        ),
    ],
)
async def test_what_is_no_file_of_weights_is_one_line(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(BadData, match=text) as refusal:
        await read_weights(open_artifacts(str(tmp_path), None), ["a.safetensors"])
    assert "\n" not in refusal.value.text


async def test_a_tensor_stands_once_and_a_folder_has_weights(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(shard(1))
    folder = open_artifacts(str(tmp_path), None)
    with pytest.raises(BadData, match=r"b\.safetensors: embed\.weight is in another shard"):
        await read_weights(folder, ["a.safetensors", "b.safetensors"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="no weights"):
        await read_weights(folder, ["config.json"])
