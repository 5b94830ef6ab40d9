"""Arithmetic whose bits do not depend on the machine's mood, and what of a model has none (DESIGN §5).

In torch's strict mode (`warn_only=False`) attention on CUDA takes deterministic backward passes: flash
attention without atomic additions, memory-efficient attention with one split of the keys; cuDNN's is left out
(torch's `aten/src/ATen/native/transformers/cuda`: `attention_backward.cu`, `sdp_utils.cpp`). With
`warn_only=True` it keeps the faster ones and only warns. An operation without a deterministic form raises in
strict mode: then the job trains as it is, and its exactness is not promised.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator

import torch
import torch.utils.deterministic

_UNABLE = re.compile(
    r"(\S+) does not have a deterministic implementation|not deterministic because.*CuBLAS", re.DOTALL
)


def compute_exactly(compute_threads: int, seed: int, *, strict: bool = True) -> None:
    """Sets this process up: threads, seed, no TF32, deterministic algorithms.

    Args:
        compute_threads: of torch's operations; a number of its own changes bits.
        seed: of the default generators.
        strict: an operation without a deterministic form raises `RuntimeError`; otherwise torch warns.
    """
    # read when cuBLAS makes its first handle: before that, in every process that may compute on CUDA
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(compute_threads)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = False
    # No operation of a sound model reads what nobody has written; to fill it would cost each allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
    _deterministic(strict=strict)


def _deterministic(*, strict: bool) -> None:
    """As `torch.use_deterministic_algorithms`, which imports torch's compiler to set an option there: half a
    second of each process's start. A model that is compiled reads the option from the environment."""
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.deterministic = True  # type: ignore[attr-defined]  # it has been read already
    torch.set_deterministic_debug_mode("error" if strict else "warn")


@contextlib.contextmanager
def tolerant() -> Iterator[None]:
    """Within the block, operations without a deterministic form run, with a warning of torch's."""
    _deterministic(strict=False)
    try:
        yield
    finally:
        _deterministic(strict=True)


def inexact_operation(error: BaseException) -> str | None:
    """The operation that strict mode refused, by torch's name for it; None: `error` is something else."""
    link: BaseException | None = error
    while link is not None:
        found = _UNABLE.search(str(link))
        if found is not None:
            return found.group(1) or "cuBLAS"
        link = link.__cause__ or link.__context__
    return None
