"""Training data: the bytes of a source as tokens, and batches as a function of (seed, step, microbatch)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import sysconfig
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from bus.files.artifacts import SCHEME, open_artifacts, open_filesystem
from bus.wire.secret_urls import hidden
from schemas.errors import BadData, BadInput, NotFound
from schemas.job_file.data import DataSpec

if TYPE_CHECKING:
    from bus.connection import Bus

Split = Literal["train", "validation"]
Batch = dict[str, Tensor]
"""Name → (samples, …) of everything that model and loss may take, in an order that is always the same."""

STDLIB = "stdlib:"
_NOT_SOURCE = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled", "pydoc_data"}
)
"""Folders of the standard library that are left out: installed packages, tests, bundled wheels and a
generated table. About 12 MB of readable source remain."""


@dataclass(frozen=True)
class ByteDataset:
    """Bytes as tokens. The last `validation_fraction` is held out; nothing is shuffled or dropped."""

    source: str
    bytes: Tensor
    train_tokens: int

    def tokens(self, split: Split) -> Tensor:
        """(tokens,) uint8; a view."""
        return self.bytes[: self.train_tokens] if split == "train" else self.bytes[self.train_tokens :]

    @property
    def has_validation(self) -> bool:
        return self.train_tokens < self.bytes.numel()


async def open_dataset(spec: DataSpec, bus: Bus | None) -> ByteDataset:
    """Reads the whole source into memory, or maps it if it is one local file.

    Sources: `stdlib:`; `bus://datasets/name` as uploaded at a gateway; any path or URL that fsspec opens:
    a file, a folder (all files in it, sorted by path, without hidden ones), or a glob.

    Raises:
        BadData: The source is missing, empty, unreadable, or shorter than one sample and the byte after it.
    """
    if not spec.source.startswith(SCHEME):
        return await asyncio.to_thread(open_local_dataset, spec)
    folder, _, name = spec.source.rpartition("/")
    try:
        content = await open_artifacts(folder, bus).get_bytes(name)
    except NotFound:
        raise BadData(f"data.source {spec.source} is not on the bus; upload it at a gateway first") from None
    except BadInput as error:
        raise BadData(f"data.source {error.text}") from None
    return _split(spec, _tensor(content))


def open_local_dataset(spec: DataSpec) -> ByteDataset:
    """Does the same as `open_dataset` for all sources but `bus://`; blocks."""
    if spec.source.startswith(STDLIB):
        return _split(spec, _standard_library())
    return _split(spec, _read_files(spec.source))


def _split(spec: DataSpec, tokens: Tensor) -> ByteDataset:
    total = tokens.numel()
    if not total:
        raise BadData(f"data.source {spec.source} is empty")
    held_out = int(total * spec.validation_fraction)
    for name, size in (("training", total - held_out), ("validation", held_out)):
        if size <= spec.sample_tokens and (name == "training" or spec.validation_fraction):
            raise BadData(
                f"data.source {spec.source} leaves {size:,} of its {total:,} bytes for {name}, less than one "
                f"sample of {spec.sample_tokens} tokens and its successor; give more data, lower "
                f"data.sample_tokens, or {'lower' if name == 'training' else 'set to 0'} "
                "data.validation_fraction"
            )
    return ByteDataset(spec.source, tokens, total - held_out)


def _tensor(content: bytes | bytearray) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8)
    own = content if isinstance(content, bytearray) else bytearray(content)
    return torch.frombuffer(own, dtype=torch.uint8)


def _standard_library() -> Tensor:
    """The running interpreter's own standard library, `*.py` sorted by path, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_SOURCE]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    content = bytearray()
    for path in sorted(paths):
        content += Path(path).read_bytes()
    if not content:
        raise BadData(f"data.source stdlib: {sys.executable} keeps no sources in {root}; name a folder")
    return _tensor(content)


def _read_files(source: str) -> Tensor:
    try:
        filesystem, path = open_filesystem(source)
    except BadInput as error:
        raise BadData(f"data.source {error.text}") from None
    try:
        if any(magic in path for magic in "*?["):
            names = [name for name in filesystem.glob(path) if filesystem.isfile(name)]
            if not names:
                raise BadData(f"data.source {source}: no file matches")
        elif filesystem.isdir(path):
            files = filesystem.find(path)
            names = [name for name in files if not _hidden(name.removeprefix(path))]
        elif filesystem.exists(path):
            names = [path]
        else:
            raise BadData(
                f"data.source {source} does not exist on this node; "
                "give a path or URL that every node can read"
            )
        if len(names) == 1 and "file" in filesystem.protocol and Path(names[0]).stat().st_size:
            size = Path(names[0]).stat().st_size
            return torch.from_file(names[0], shared=False, size=size, dtype=torch.uint8)
        content = bytearray()
        for name in sorted(names):
            content += filesystem.cat_file(name)
    except OSError as error:
        raise BadData(f"data.source {source} can't be read: {hidden(str(error.strerror or error))}") from None
    return _tensor(content)


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def batch(
    dataset: ByteDataset,
    split: Split,
    seed: int,
    step: int,
    microbatch: int,
    samples: int,
    sample_tokens: int,
) -> Batch:
    """Samples at offsets drawn by BLAKE2b from (seed, split, step, microbatch, sample) only.

    So any data instance can make any batch, repeatedly, on any version of torch.

    Returns:
        `inputs` and `targets`, each (samples, sample_tokens) int64; targets are the inputs one token later.

    Raises:
        BadData: The split holds no whole sample.
    """
    tokens = dataset.tokens(split)
    choices = tokens.numel() - sample_tokens
    if choices < 1:
        raise BadData(
            f"data.source {dataset.source}: the {split} part holds no sample of {sample_tokens} tokens"
        )
    rows = []
    for sample in range(samples):
        text = f"{seed}/{split}/{step}/{microbatch}/{sample}".encode()
        offset = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % choices
        rows.append(tokens[offset : offset + sample_tokens + 1])
    window = torch.stack(rows).to(torch.int64)
    return {"inputs": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}


class Prefetcher:
    """Makes expected batches ahead, on one thread.

    At most `capacity` are kept ready. Batches are needed in the order in which they are expected, so one that
    finds all places taken is made when it is needed.

    Args:
        dataset: The source of the batches.
        seed: The job's `training.seed`.
        samples: Samples of a batch.
        sample_tokens: Tokens of a sample.
        capacity: Batches kept ready; each takes samples × sample_tokens × 16 bytes.
    """

    def __init__(
        self, dataset: ByteDataset, *, seed: int, samples: int, sample_tokens: int, capacity: int = 64
    ) -> None:
        self._dataset = dataset
        self._shape = (samples, sample_tokens)
        self._seed = seed
        self._capacity = capacity
        self._ahead: dict[tuple[Split, int, int], Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        """Makes a batch ahead that will probably be needed soon. Call it on the thread that calls `get`."""
        key = (split, step, microbatch)
        if key in self._ahead:
            return
        if len(self._ahead) >= self._capacity:
            self._drop_before(step - 1)
        if len(self._ahead) < self._capacity:
            self._ahead[key] = self._thread.submit(self._make, *key)

    def _drop_before(self, step: int) -> None:
        """Drops batches of past steps, which were dispatched to other instances, to free their places."""
        for key in [key for key in self._ahead if key[1] < step]:
            self._ahead.pop(key).cancel()

    async def get(self, split: Split, step: int, microbatch: int) -> Batch:
        """The batch, made ahead or now."""
        key = (split, step, microbatch)
        future = self._ahead.pop(key, None) or self._thread.submit(self._make, *key)
        return await asyncio.wrap_future(future)

    @property
    def waiting(self) -> int:
        return len(self._ahead)

    def _make(self, split: Split, step: int, microbatch: int) -> Batch:
        return batch(self._dataset, split, self._seed, step, microbatch, *self._shape)

    def close(self) -> None:
        """Drops the batches made ahead and ends the thread. Idempotent."""
        self._ahead.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
