"""Deterministic arithmetic, and the operations of a model that have no deterministic form (DESIGN §5).

In torch's strict mode (`warn_only=False`) attention on CUDA uses deterministic backward passes: flash
attention without atomic additions, memory-efficient attention with one split of the keys, and not cuDNN's
(torch's `aten/src/ATen/native/transformers/cuda`: `attention_backward.cu`, `sdp_utils.cpp`). With
`warn_only=True` it keeps the faster ones and only warns. An operation without a deterministic form raises in
strict mode; such a job trains without strict mode, and its exactness is not promised.
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
    """Sets up this process: threads, seed, no TF32, deterministic algorithms.

    Args:
        compute_threads: Threads of torch's operations; another number changes bits.
        seed: Seed of the default generators.
        strict: An operation without a deterministic form raises `RuntimeError`; otherwise torch warns.
    """
    # cuBLAS reads this when it makes its first handle; set in every process that may compute on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(compute_threads)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = False
    # A correct model reads no uninitialised memory; filling it would slow down each allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
    _deterministic(strict=strict)


def _deterministic(*, strict: bool) -> None:
    """Does the same as `torch.use_deterministic_algorithms` without importing torch's compiler.

    That import, only to set an option, takes half a second of each process's start. A compiled model reads
    the option from the environment.
    """
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.deterministic = True  # type: ignore[attr-defined]  # it has read the environment already
    torch.set_deterministic_debug_mode("error" if strict else "warn")


@contextlib.contextmanager
def tolerant() -> Iterator[None]:
    """Lets operations without a deterministic form run inside the block; torch warns."""
    _deterministic(strict=False)
    try:
        yield
    finally:
        _deterministic(strict=True)


def inexact_operation(error: BaseException) -> str | None:
    """The operation that strict mode refused, by torch's name for it; None: `error` has another cause."""
    link: BaseException | None = error
    while link is not None:
        match = _UNABLE.search(str(link))
        if match is not None:
            return match.group(1) or "cuBLAS"
        link = link.__cause__ or link.__context__
    return None
