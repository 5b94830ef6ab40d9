"""Layers that torch's compiler compiles (`training.compile`): the modules that they call, each by itself.

A cut falls between layers, so that what is compiled is the same wherever the model is cut. Shapes are static:
other sizes are compiled anew, and never run through code for sizes that vary. Random numbers are drawn by
torch's own functions. The bits are those of the generated code: other ones than those of plain torch, and the
same on every machine with the same torch, compiler and instruction set, which `compiler_digest` names.
Nothing here is imported by a job without it: torch's compiler takes seconds to import.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from schemas.errors import BadModel


class CompiledModules:
    """Compiles modules when they are first called."""

    def __init__(self) -> None:
        _configure()
        self._made: dict[int, Callable[..., Any]] = {}

    def of(self, module: nn.Module, where: str) -> Callable[..., Any]:
        """A callable that computes what the module does; it raises `BadModel` where that can't be compiled.

        Args:
            module: A module that some layer calls.
            where: The layer, for messages.
        """
        if id(module) not in self._made:
            self._made[id(module)] = _in_one_line(torch.compile(module, fullgraph=True, dynamic=False), where)
        return self._made[id(module)]


def _in_one_line(compiled: Callable[..., Any], where: str) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Exception as error:  # of the compiler, or of user code
            if not (text := _compiler_text(error)):
                raise
            raise BadModel(f"{where} can't be compiled: leave it out of training.compile ({text})") from error

    return called


def check_compiler(node: str, device: str = "cpu") -> str:
    """The digest of the compiler here, for code on this device; see `compiler_digest`.

    Raises:
        BadModel: There is none; the line names the node.
    """
    if _command() is None:
        raise BadModel(
            f"node {node} lacks a C++ compiler (g++), which training.compile needs: install it there, or "
            "leave training.compile out"
        )
    return compiler_digest(device)


@cache
def compiler_digest(device: str) -> str:
    """What the bits of compiled layers depend on besides the model: torch, compiler, and what it makes of
    this processor."""
    command = _command()
    assert command is not None
    asked = ([command, "--version"], [command, "-march=native", "-Q", "--help=target"])
    found = [subprocess.run(each, capture_output=True, check=False).stdout for each in asked]
    words = [torch.__version__.encode(), torch.backends.cpu.get_cpu_capability().encode(), *found]
    if torch.device(device).type == "cuda":
        words += [torch.cuda.get_device_name(device).encode(), str(torch.version.cuda).encode()]
    return hashlib.sha256(b"\0".join(words)).hexdigest()


def _compiler_text(error: BaseException) -> str:
    """One line of what the compiler says; empty: the error is none of the compiler's."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _command() -> str | None:
    return shutil.which("g++")


@cache
def _configure() -> None:
    import torch._dynamo.config as tracing
    import torch._inductor.config as generating

    tracing.recompile_limit = tracing.accumulated_recompile_limit = 1 << 20
    tracing.fail_on_recompile_limit_hit = True
    generating.compile_threads = 1  # no processes beside this one
    generating.fallback_random = True
    generating.cpp_cache_precompile_headers = False  # a hundred megabytes in a small folder
