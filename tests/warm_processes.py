"""Processes forked from one that has imported everything already: each import of torch takes seconds.

One server per test process, started when first needed; it ends with it. What is forked is a process like any
other: its own pid, its own exit code, killed like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch",
    "torch.distributed",
    "bus.connection",
    "workers.links",
    "workers.reduction",
    "httpx",
    "dmsc.cli",
    "dmsc.client",
    "dmsc.mesh",
    __name__,
]


def warm_up() -> None:
    """Starts the server, unless it runs."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def start(script: Path, *args: object) -> tuple[ForkServerProcess, Connection]:
    """A script's process, and the reading end of its standard output."""
    warm_up()
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_script, args=(writer, str(script), [str(arg) for arg in args]))
    process.start()
    writer.close()
    return process, reader


def _script(output: Connection, script: str, args: list[str]) -> None:
    os.dup2(output.fileno(), sys.stdout.fileno())
    output.close()
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


def run_module(
    module: str, arguments: tuple[str, ...], *, cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """`python -m module ARGUMENTS`, to the end; raises `subprocess.TimeoutExpired`."""
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = CONTEXT.Process(
            target=_module, args=(module, arguments, str(cwd), dict(environment), str(out), str(err))
        )
        process.start()
        process.join(timeout_s)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        said = [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]
    if late:
        raise subprocess.TimeoutExpired([module, *arguments], timeout_s, *said)
    assert code is not None
    return subprocess.CompletedProcess([module, *arguments], code, *said)


def _module(
    module: str, arguments: tuple[str, ...], cwd: str, environment: dict[str, str], out: str, err: str
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.path.insert(0, cwd)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
