"""What a decoder's error means, what an image is as a tensor, and the randomness of one sample."""

from __future__ import annotations

import gzip
import importlib
import json
import pickle
import random
import traceback
import zlib
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import BadData

_BYTES = (EOFError, UnicodeDecodeError, json.JSONDecodeError, pickle.UnpicklingError, zlib.error)


def by_its_bytes(error: BaseException) -> bool:
    """Whether a decoder failed at what it read, not at reading: an image that is cut off, for instance.

    Pillow raises OSError for both, and so do the network's libraries, whose errors have no number either. So
    only what Pillow itself raises counts: a node whose network fails must not train on another sample.
    """
    if isinstance(error, OSError):
        return isinstance(error, gzip.BadGzipFile) or (error.errno is None and _raiser(error) == "PIL")
    return isinstance(error, _BYTES)


def _raiser(error: BaseException) -> str:
    """The package whose code raised it."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(names[-1]).partition(".")[0] if names else ""


def library(name: str, kind: str, key: str) -> ModuleType:
    """An optional library that a kind needs.

    Raises:
        BadData: It is not installed here.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise BadData(
            f"{key}: kind {kind} needs {name.partition('.')[0]}, which is not installed on this node: "
            "pip install 'dmsc[data]' wherever the job may run"
        ) from None


def image_tensor(image: Any) -> Tensor:
    """A Pillow image as (channels, height, width) float32 from 0 to 1, as `to_tensor` of torchvision."""
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[:, :, None]
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    return torch.from_numpy(np.ascontiguousarray(array.transpose(2, 0, 1))).to(torch.float32).div_(scale)


def is_image(value: Any) -> bool:
    """Whether it is a Pillow image; Pillow is not imported for it."""
    if isinstance(value, Tensor | int | float | np.ndarray):
        return False
    return any(kind.__module__ == "PIL.Image" for kind in type(value).__mro__)


def seed_generators(seed: int) -> None:
    """Seeds torch's (on the CPU), numpy's and Python's own generators, which users' code draws from.

    They stay so: nothing else in a data instance draws from them, and to put them back takes longer.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & ((1 << 63) - 1))
