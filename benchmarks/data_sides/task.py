"""What a side is to do, and what it answers; the files that all sides read."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np
import psutil
import torch
from torch import Tensor

IMAGE_PIXELS, TOKENS = 160, 1024
COLUMNS = {
    "images": {"inputs": "jpeg", "targets": "int"},
    "tokens": {"inputs": f"ndarray:int64:{TOKENS}", "targets": f"ndarray:int64:{TOKENS}"},
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of one side.

    Attributes:
        form: `images` or `tokens`.
        folder: Where the files are, if they are on this machine.
        endpoint, bucket: Where they are else.
        cache: An empty folder, for what is kept of files that are elsewhere.
        workers: Processes that make batches.
        samples: Of a batch.
        count: Of the data set.
        epochs: How often it is read.
    """

    form: str
    folder: str
    cache: str
    workers: int
    samples: int
    count: int
    epochs: int
    endpoint: str = ""
    bucket: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a side measured.

    Attributes:
        rates: Samples per second of each epoch, the first one from its first batch.
        first_s: Seconds until that came: processes start, links are built.
        memory_bytes: Of all worker processes, their own at the end.
        cpu_s: CPU time of the worker processes.
        taking_cpu_s: CPU time of the process that takes the batches, while it does.
    """

    rates: list[float]
    first_s: float
    memory_bytes: int
    cpu_s: float
    taking_cpu_s: float

    def text(self) -> str:
        return json.dumps(asdict(self))


def take(tensors: Iterable[Tensor]) -> None:
    """What a stage does first: it reads a batch.

    Until then the pages of shared memory are not this process's, and cost their faults.
    """
    for tensor in tensors:
        tensor.view(torch.uint8).max()


def unique_bytes(processes: Iterable[int]) -> int:
    """Memory of these processes that is theirs alone."""
    return sum(psutil.Process(process).memory_full_info().uss for process in processes)


def cpu_seconds(processes: Iterable[int]) -> float:
    """CPU time of these processes."""
    return sum(sum(psutil.Process(process).cpu_times()[:2]) for process in processes)


def write_shards(folder: Path, form: str, count: int, shard_bytes: int = 16 << 20) -> None:
    """Writes MDS shards; always the same bytes."""
    draw = np.random.default_rng(0)
    columns = COLUMNS[form]
    rows: list[bytes] = []
    shards: list[dict[str, object]] = []

    def flush() -> None:
        config = json.dumps({"columns": columns}).encode()
        offsets = 4 * (len(rows) + 2) + len(config) + np.cumsum([0, *map(len, rows)])
        content = struct.pack("<I", len(rows)) + offsets.astype("<u4").tobytes() + config + b"".join(rows)
        name = f"shard.{len(shards):05d}.mds"
        (folder / name).write_bytes(content)
        shards.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": [None, 8] if form == "images" else [8 * TOKENS] * 2,
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(content), "hashes": {}},
                "samples": len(rows),
                "size_limit": shard_bytes,
                "version": 2,
                "zip_data": None,
            }
        )
        rows.clear()

    for number in range(count):
        if form == "images":
            image = _jpeg(draw)
            rows.append(struct.pack("<I", len(image)) + image + struct.pack("<q", number % 1000))
        else:
            tokens = draw.integers(0, 50_000, TOKENS + 1)
            rows.append(tokens[:-1].tobytes() + tokens[1:].tobytes())
        if sum(map(len, rows[-1:])) * len(rows) >= shard_bytes:
            flush()
    if rows:
        flush()
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _jpeg(draw: np.random.Generator) -> bytes:
    """A smooth random picture, which compresses about as photographs do."""
    from PIL import Image

    small = draw.integers(0, 255, (20, 20, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize((IMAGE_PIXELS, IMAGE_PIXELS), Image.Resampling.BICUBIC)
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=90)
    return content.getvalue()
