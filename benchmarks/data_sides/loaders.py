"""The sides of others: torch's and torchdata's loaders over a plain data set, and MosaicML Streaming.

python -m benchmarks.data_sides.loaders SIDE TASK
"""

from __future__ import annotations

import io
import itertools
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.data_sides.task import TOKENS, Answer, Task, cpu_seconds, take, unique_bytes


def to_tensors(inputs: Any, targets: Any) -> dict[str, Tensor]:
    """A sample as a user would turn it into tensors."""
    if isinstance(inputs, np.ndarray):
        return {"inputs": torch.from_numpy(np.array(inputs)), "targets": torch.from_numpy(np.array(targets))}
    pixels = torch.from_numpy(np.array(inputs.convert("RGB")))
    return {"inputs": pixels.permute(2, 0, 1).contiguous(), "targets": torch.tensor(targets)}


class PlainShards(Dataset[dict[str, Tensor]]):
    """The same files, mapped: about the least that a data set of one's own can cost."""

    def __init__(self, folder: Path, form: str) -> None:
        self._form = form
        shards = json.loads((folder / "index.json").read_text())["shards"]
        self._places: list[tuple[int, int, int]] = []
        self._paths = [folder / shard["raw_data"]["basename"] for shard in shards]
        self._maps: dict[int, mmap.mmap] = {}
        for number, shard in enumerate(shards):
            head = self._paths[number].read_bytes()[: 4 * (shard["samples"] + 2)]
            offsets = np.frombuffer(head, "<u4", offset=4).tolist()
            self._places += [(number, start, end) for start, end in itertools.pairwise(offsets)]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        from PIL import Image

        shard, start, end = self._places[index]
        if shard not in self._maps:
            with self._paths[shard].open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = self._maps[shard][start:end]
        if self._form == "tokens":
            tokens = np.frombuffer(data, np.int64)
            return to_tensors(tokens[:TOKENS], tokens[TOKENS:])
        (size,) = struct.unpack_from("<I", data)
        return to_tensors(
            Image.open(io.BytesIO(data[4 : 4 + size])), struct.unpack_from("<q", data, 4 + size)[0]
        )


def torch_loader(task: Task) -> Iterable[Any]:
    return DataLoader(PlainShards(Path(task.folder), task.form), **options(task), shuffle=True)


def torchdata_loader(task: Task) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(PlainShards(Path(task.folder), task.form), **options(task), shuffle=True)
    return cast(Iterable[Any], loader)


def streaming_loader(task: Task) -> Iterable[Any]:
    from streaming import StreamingDataLoader, StreamingDataset

    class Samples(StreamingDataset):  # type: ignore[misc]  # no types of its own
        def __getitem__(self, at: int) -> Any:
            sample = super().__getitem__(at)
            return to_tensors(sample["inputs"], sample["targets"])

    more: dict[str, Any] = {"local": task.folder}
    if task.endpoint:
        os.environ.update(
            S3_ENDPOINT_URL=task.endpoint, AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="benchbench"
        )
        more = {"local": task.cache, "remote": f"s3://{task.bucket}"}
    data = Samples(**more, shuffle=True, batch_size=task.samples)
    return cast(Iterable[Any], StreamingDataLoader(data, **options(task)))


def options(task: Task) -> dict[str, Any]:
    return {
        "batch_size": task.samples,
        "num_workers": task.workers,
        "drop_last": True,
        "persistent_workers": True,
    }


SIDES: dict[str, Callable[[Task], Iterable[Any]]] = {
    "DataLoader": torch_loader,
    "StatefulDataLoader": torchdata_loader,
    "MosaicML Streaming": streaming_loader,
}


def run(side: str, task: Task) -> Answer:
    torch.set_num_threads(1)
    loader = SIDES[side](task)
    rates = []
    first_s = 0.0
    memory, cpu_s, before_s = 0, 0.0, time.process_time()
    for _ in range(task.epochs):
        began, seen = time.perf_counter(), 0
        for batch in loader:
            take(batch.values())
            if not first_s:
                first_s, began = time.perf_counter() - began, time.perf_counter()
                continue
            seen += len(batch["targets"])
            if seen >= (len(cast(Sized, loader)) - 1) * task.samples:
                workers = [each.pid for each in psutil.Process().children() if "resource" not in each.name()]
                memory, cpu_s = unique_bytes(workers), cpu_seconds(workers)
        rates.append(seen / (time.perf_counter() - began))
    taking_s = time.process_time() - before_s
    return Answer(rates=rates, first_s=first_s, memory_bytes=memory, cpu_s=cpu_s, taking_cpu_s=taking_s)


if __name__ == "__main__":
    print(run(sys.argv[1], Task.of(sys.argv[2])).text())
