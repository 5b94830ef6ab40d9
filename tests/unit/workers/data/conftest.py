"""A user's working directory: code of the user's own, and files of each kind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CODE = """
import random
from urllib.error import URLError

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset


class Squares(Dataset):
    def __init__(self, size=40, names=True):
        self.size, self.names = size, names

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.full((3,), float(index))
        return {"x": x, "y": index * index} if self.names else (x, index * index)


class Noisy(Squares):
    def __getitem__(self, index):
        return {"index": index, "torch": torch.rand(()), "numpy": np.random.rand(), "python": random.random()}


class Damaged(Squares):
    def __init__(self, size=40, bad=(3,), error="bytes"):
        super().__init__(size)
        self.bad, self.error = bad, error

    def __getitem__(self, index):
        if self.bad == "all" or index in self.bad:
            if self.error == "bytes":
                raise EOFError("cut off")
            if self.error == "network":
                raise URLError("the server does not answer")
            raise OSError(5, "Input/output error") if self.error == "disk" else ValueError("no such label")
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __init__(self, size=30):
        self.size = size

    def __iter__(self):
        number = 0
        while number != self.size:
            yield {"x": torch.tensor([number, random.random()]), "y": number}
            number += 1


class Boxes(Squares):
    def __getitem__(self, index):
        return {"x": torch.tensor([index]), "boxes": [torch.full((2,), float(index)), torch.arange(index)]}


class Changing(Squares):
    reads = 0

    def __getitem__(self, index):
        Changing.reads += 1
        return {"x": Changing.reads}


class Ragged(Squares):
    def __getitem__(self, index):
        return {"x": torch.arange(index % 5 + 1), "y": index}


def tensors(): return TensorDataset(torch.arange(80.0).reshape(40, 2), torch.arange(40))
def number(): return 3
def fails(path): raise FileNotFoundError(2, "No such file", path)
def padded(items):
    width = 6
    rows = torch.zeros(len(items), width, dtype=torch.int64)
    for row, item in zip(rows, items):
        row[: len(item["x"])] = item["x"]
    return {"x": rows, "y": torch.tensor([item["y"] for item in items])}
def tight(items):
    width = max(len(item["x"]) for item in items)
    return {name: tensor[:, :width] if name == "x" else tensor for name, tensor in padded(items).items()}
def boxed(items): return {"x": torch.stack([item["x"] for item in items])}
def short(items): return torch.zeros(1)
def jittered(row): return {**row, "x": row["x"] + torch.rand(3)}
def inverted(image):
    from PIL import ImageOps
    return ImageOps.invert(image)
def sentences(row): return {"length": len(row["text"])}
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder; its module is `users_data`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "users_data.py").write_text(CODE)
    sys.modules.pop("users_data", None)
    yield tmp_path
    sys.modules.pop("users_data", None)
