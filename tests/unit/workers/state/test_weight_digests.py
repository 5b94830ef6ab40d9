"""Weights that are not the ones of the version are refused in one line, whatever was damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bus.files.artifacts import open_artifacts
from schemas.errors import BadModel
from schemas.job_file.initial_weights import InitialWeights
from schemas.weights_digest import INDEX_NAME, indexed_tensors, weights_index, weights_sha256
from tests.builders.jobs import gpt_model
from workers.compute.model import build
from workers.graph.stage_module import StageModule, slice_stage
from workers.state.initial_weights import load_initial
from workers.state.weights import export

SHARD = "model-{:05d}-of-00002.safetensors"


def stage(first: int, last: int, seed: int = 0) -> StageModule:
    return slice_stage(build(gpt_model(), seed), first, last)


async def written(folder: Path, *, indexed: bool) -> str:
    """Weights of two stages with an index, with each tensor's digest in it or not; returns the digest."""
    artifacts = open_artifacts(str(folder), None)
    lines: dict[str, str] = {}
    shard_of: dict[str, str] = {}
    for number, part in enumerate((stage(0, 2), stage(2, 4)), start=1):
        _, tensors = await export(part, artifacts, SHARD.format(number))
        lines |= tensors
        shard_of |= dict.fromkeys(tensors, SHARD.format(number))
    index = weights_index(shard_of, 1, {}, lines if indexed else {})
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return weights_sha256(lines)


async def load(folder: Path, sha256: str, parts: Sequence[StageModule]) -> None:
    for part in parts:
        source = InitialWeights(url=str(folder), sha256=sha256)
        await load_initial(part, open_artifacts(str(folder), None), source, checked=True)


def damage(path: Path) -> None:
    """Flips a bit of the last tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("indexed", [True, False])
async def test_each_stage_checks_what_it_loads(tmp_path: Path, indexed: bool) -> None:
    sha256 = await written(tmp_path, indexed=indexed)
    whole = dict(stage(0, 4).named_parameters())
    parts = [stage(0, 1, seed=5), stage(1, 4, seed=5)]
    await load(tmp_path, sha256, parts)
    for part in parts:
        for name, weight in part.named_parameters():
            assert torch.equal(weight, whole[name])
    damage(tmp_path / SHARD.format(2))
    with pytest.raises(BadModel) as raised:
        await load(tmp_path, sha256, [stage(1, 4)])
    if indexed:
        assert f"{SHARD.format(2)} is damaged: " in raised.value.text
        assert raised.value.text.endswith(" is not what the version's digest says: copy the file anew")
        await load(tmp_path, sha256, [stage(0, 2)])  # nothing of the damaged file
    else:
        assert "these are other weights than the version's: their digest is " in raised.value.text
    assert "\n" not in raised.value.text


async def test_weights_of_another_digest_are_refused(tmp_path: Path) -> None:
    sha256 = await written(tmp_path, indexed=True)
    with pytest.raises(BadModel) as raised:
        await load(tmp_path, "0" * 64, [stage(0, 4)])
    assert raised.value.text == (
        f"initial_weights {tmp_path}: these are other weights than the version's: their digest is "
        f"{sha256[:12]}, not 000000000000: bring the former files back, or deploy them as another version"
    )
    # What the index says of itself is no proof: somebody may have written it anew.
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    lines = index["metadata"]["tensor_sha256"]
    name = next(iter(lines))
    lines[name] = lines[name][:-1] + ("0" if lines[name][-1] != "0" else "1")
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(BadModel, match="other weights than the version's"):
        await load(tmp_path, sha256, [stage(0, 4)])


def test_an_index_tells_each_tensor_under_its_name_in_the_files() -> None:
    index = weights_index({"a": "x"}, 4, {"a": "model.a"}, {"a": "float32 [1] ff"})
    assert index["weight_map"] == {"model.a": "x"}
    assert indexed_tensors(index) == {"model.a": ("a", "float32 [1] ff")}
    assert indexed_tensors(weights_index({"a": "x"}, 4)) == {}
    assert indexed_tensors({"metadata": None}) == {}
