"""The digest recomputed without torch is the one that workers compute with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dmsc.client.weights_check import check_weights, tensor_lines
from schemas.errors import BadData, DmscError
from schemas.job import WeightsManifest
from schemas.weights_digest import INDEX_NAME, weights_sha256
from workers.state.safetensors_files import describe_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_same_lines_as_the_workers(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a.weight": torch.arange(12).reshape(3, 4).to(dtype), "scalar": torch.ones((), dtype=dtype)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    assert tensor_lines(tmp_path / "x.safetensors") == {
        name: describe_tensor(tensor) for name, tensor in tensors.items()
    }


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(8)}, path)
    manifest = WeightsManifest(
        url="",
        shards=(path.name, INDEX_NAME),
        tensors={"a": path.name},
        bytes=32,
        sha256=weights_sha256(tensor_lines(path)),
        step=1,
    )
    check_weights(tmp_path, manifest)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DmscError, match="damaged"):
        check_weights(tmp_path, manifest)


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 40])
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadData, match="is not a safetensors file"):
        tensor_lines(path)
