"""The files that `make bench-data` makes are what all sides read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.data_sides.loaders import PlainShards
from benchmarks.data_sides.product import spec_of
from benchmarks.data_sides.task import Task, write_shards
from workers.data.opening import open_source


@pytest.mark.parametrize("form", ["images", "tokens"])
async def test_both_sides_read_the_same_samples(form: str, tmp_path: Path) -> None:
    write_shards(tmp_path, form, 20, shard_bytes=1 << 16)
    task = Task(form=form, folder=str(tmp_path), cache="", workers=1, samples=20, count=20, epochs=1)
    source = await open_source(spec_of(task), None)
    batch = source.batch("train", 0, 0)
    source.close()
    plain = PlainShards(tmp_path, form)
    assert len(plain) == 20
    mine = {tuple(row.flatten()[:50].tolist()) for row in batch["inputs"]}
    assert mine == {tuple(plain[index]["inputs"].flatten()[:50].tolist()) for index in range(20)}
    assert batch["inputs"].dtype == plain[0]["inputs"].dtype
    assert batch["targets"].dtype == torch.int64
