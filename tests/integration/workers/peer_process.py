"""Scripts run in processes of their own, forked from one that has imported torch: that takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed", "bus.connection", "workers.links", "workers.reduction", __name__]


def warm_up() -> None:
    """Starts the server; it ends with this process."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def start(script: Path, *args: object) -> tuple[ForkServerProcess, Connection]:
    """The process, and the reading end of its standard output."""
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_run, args=(writer, str(script), [str(arg) for arg in args]))
    process.start()
    writer.close()
    return process, reader


def _run(output: Connection, script: str, args: list[str]) -> None:
    os.dup2(output.fileno(), sys.stdout.fileno())
    output.close()
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
