"""The kernel of exact sums: built by a C compiler, kept beside our bytecode, loaded by who sums (ADR-0063).

The fork server builds it before it forks; instances and all other processes only load what is there. It is
kept where Python keeps the bytecode of this package: who can write there can change what we run anyway. Its
name holds the hash of its source and of the command, so that it can't be stale. Where there is no compiler,
or one bit is other than torch's, there is no kernel, and sums take three times as long.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("fixed_point.c")
_FLAGS = ("-O3", "-ffp-contract=off", "-fPIC", "-shared")
_MOST = 127.0
"""The largest |gradient| that the kernel rounds as torch does."""

Addend = tuple[Tensor, Tensor, bool]
"""(gradient (n,) float32, its part of the sum (n,) int64, whether it is written over what is there)."""


class FixedPointKernel:
    """The functions of `fixed_point.c` on contiguous CPU tensors. They hold no lock of the interpreter."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self._add = _function(library.dmsc_add, ctypes.c_uint32, pointer, pointer, count)
        self._set = _function(library.dmsc_set, ctypes.c_uint32, pointer, pointer, count)
        self._take_back = _function(library.dmsc_take_back, None, pointer, pointer, count)
        self._finish = _function(
            library.dmsc_finish, ctypes.c_uint64, pointer, pointer, pointer, count, number, number
        )
        self._bytes_needed = _function(library.dmsc_bytes_needed, count, pointer, count)
        self._pack = _function(library.dmsc_pack, None, pointer, pointer, count, count)
        self._add_packed = _function(library.dmsc_add_packed, None, pointer, pointer, count, count)

    def add(self, addends: Sequence[Addend], limit: float) -> bool:
        """Adds round(g · 2^44) of all gradients g, half to even.

        Returns:
            False if one is not finite, beyond `limit`, or too large for the kernel. Then nothing was added;
            what was to be written over is undefined.
        """
        most = min(limit, _MOST)
        for number, (gradient, sums, over) in enumerate(addends):
            call = self._set if over else self._add
            word = call(sums.data_ptr(), gradient.data_ptr(), gradient.numel())
            (largest,) = struct.unpack("<f", word.to_bytes(4, "little"))
            if not largest <= most:  # NaN is no number to compare
                for own, target, written_over in addends[: number + 1]:
                    if not written_over:
                        self._take_back(target.data_ptr(), own.data_ptr(), own.numel())
                return False
        return True

    def finish(self, sums: Tensor, weights: Tensor, means: Tensor, divisor: float, factor: float) -> int:
        """Writes sums / divisor, and returns the dot product of sums and weights modulo 2^64.

        Args:
            sums: (n,) int64.
            weights: At least (n,) int64.
            means: (n,) float32, written: the quotient in float64, rounded to float32.
            divisor: What is divided by.
            factor: 1 / divisor if that is exact, otherwise 0.
        """
        return int(
            self._finish(means.data_ptr(), sums.data_ptr(), weights.data_ptr(), sums.numel(), divisor, factor)
        )

    def bytes_needed(self, sums: Tensor) -> int:
        """How many bytes hold each of these signed numbers, (n,) int64: 4, 5, 6 or 8."""
        return self._bytes_needed(sums.data_ptr(), sums.numel())

    def pack(self, sums: Tensor, bytes_each: int, packed: Tensor) -> None:
        """Writes (n,) int64 into (n · bytes_each,) uint8, as `workers.fixed_point.packing` says."""
        self._pack(packed.data_ptr(), sums.data_ptr(), sums.numel(), bytes_each)

    def add_packed(self, sums: Tensor, bytes_each: int, packed: Tensor) -> None:
        """Adds to (n,) int64 what `pack` wrote, modulo 2^64."""
        self._add_packed(sums.data_ptr(), packed.data_ptr(), sums.numel(), bytes_each)


def _function(function: Callable[..., int], result: type | None, *arguments: type) -> Callable[..., int]:
    function.restype = result  # type: ignore[attr-defined]
    function.argtypes = arguments  # type: ignore[attr-defined]
    return function


def kernel() -> FixedPointKernel | None:
    """The kernel of this source, if it was built; None: there is none, or it gives other bits than torch."""
    if not _looked:
        _keep(_load(_place()))
    return _looked[0]


def build(within_s: float = 60.0) -> str:
    """Builds the kernel if it is not there yet, and loads it for all processes forked from here on.

    Args:
        within_s: A compiler takes 0.2 s; one that hangs must not keep a node from being ready for longer.

    Returns:
        Why there is none; empty if there is one.
    """
    if kernel() is not None:
        return ""
    compiler = shutil.which("cc")
    if compiler is None:
        return "no C compiler `cc` is here"
    try:
        _keep(_compiled(compiler, _place(), within_s))
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if kernel() is not None else "it can't be loaded, or gives other bits than torch"


_looked: list[FixedPointKernel | None] = []
"""What this process has found, once it has looked; forked processes inherit it."""


def _keep(found: FixedPointKernel | None) -> None:
    _looked[:] = [found]


def _place() -> Path:
    key = repr((_SOURCE.read_bytes(), _FLAGS, platform.machine(), sys.platform))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(importlib.util.cache_from_source(str(_SOURCE))).with_name(f"fixed_point.{digest}.so")


def _load(path: Path) -> FixedPointKernel | None:
    try:
        found = FixedPointKernel(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # else the check starts torch's pool, and a fork server can't fork after that
    try:
        return found if _agrees(found) else None
    finally:
        torch.set_num_threads(threads)


def _compiled(compiler: str, path: Path, within_s: float) -> FixedPointKernel | None:
    """Compiles into a folder of our own, then renames, so that whoever loads it sees all of it.

    Where nothing may or can be kept, it is loaded from that folder: mapped memory outlives its file.
    """
    kept = not sys.dont_write_bytecode and _is_writable(path.parent)
    with tempfile.TemporaryDirectory(prefix=".fixed_point-", dir=path.parent if kept else None) as folder:
        made = Path(folder) / "made.so"
        done = subprocess.run(
            [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)],
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=within_s,
        )
        if not made.exists():
            text = done.stderr.strip().split("\n")[0]
            raise OSError(f"{compiler} ended with {done.returncode}: {text}")
        made.chmod(0o755)
        if kept:
            made = made.replace(path)
        return _load(made)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _agrees(kernel: FixedPointKernel) -> bool:
    """Whether it gives torch's bits for numbers of each size and ties, and takes back what is no number."""
    generator = torch.Generator().manual_seed(0x444D5343)
    words = torch.randint(-(2**31), 2**31, (4099,), generator=generator, dtype=torch.int64).to(torch.int32)
    drawn = words.view(torch.float32)
    ties = torch.arange(-9.0, 9.0) * 2.0**-45
    gradient = torch.cat([drawn[drawn.abs() <= _MOST], ties, torch.tensor([0.0, -0.0, _MOST, -_MOST])])
    expected = (gradient.double() * 2.0**44).round().to(torch.int64)
    sums = torch.empty_like(expected)
    good = kernel.add([(gradient, sums, True)], _MOST) and torch.equal(sums, expected)
    good = good and kernel.add([(gradient, sums, False)], _MOST) and torch.equal(sums, 2 * expected)
    for bad in (float("nan"), float("inf"), -128.0):
        gradient[7] = bad
        good = good and not kernel.add([(gradient, sums, False)], _MOST) and torch.equal(sums, 2 * expected)
    wide = torch.randint(-(2**63), 2**63 - 1, (4099,), generator=generator, dtype=torch.int64)
    weights = wide.flip(0).contiguous()
    for divisor, factor in ((3 * 2.0**44, 0.0), (2.0**46, 2.0**-46)):
        means = torch.empty(wide.numel())
        product = kernel.finish(wide, weights, means, divisor, factor)
        good = good and product == int((wide * weights).sum()) % 2**64
        good = good and torch.equal(means, wide.double().div(divisor).float())
    return good
