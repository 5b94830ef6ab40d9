"""Processes that end with a block, and the order in which what is compared has its turns."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

DMSC = (sys.executable, "-m", "dmsc")

Side = TypeVar("Side")


def turns(sides: Sequence[Side], rounds: int) -> Iterator[tuple[int, Side]]:
    """Each side once per round, as (round, side); every other round in reverse.

    Whatever else the machine does, or a machine that slows down, then favours no side.
    """
    for number in range(rounds):
        for side in sides[::-1] if number % 2 else sides:
            yield number, side


@asynccontextmanager
async def child(
    *command: str, until_line: bool = False, environment: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is terminated when the block ends.

    Args:
        command: The arguments of Python, or `dmsc` and those of the product's command line.
        until_line: Whether to wait for its first line on stdout, which says that it is ready.
        environment: Variables for it, beside those of this process.
    """
    arguments = [*DMSC, *command[1:]] if command[0] == "dmsc" else [sys.executable, *command]
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdout=asyncio.subprocess.PIPE if until_line else None,
        env={**os.environ, **(environment or {})},
    )
    try:
        if process.stdout is not None and not await process.stdout.readline():
            raise SystemExit(f"a part of the benchmark ended while starting: {' '.join(command)[:200]}")
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@contextmanager
def modules(
    folder: Path, *commands: Sequence[str], log: Path | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Functional modules, one `dmsc policy run …` for each command, terminated when the block ends."""
    with ExitStack() as stack:
        found = []
        for command in commands:
            out = stack.enter_context(log.open("ab")) if log is not None else subprocess.DEVNULL
            found.append(
                subprocess.Popen([*DMSC, "policy", "run", *command], cwd=folder, stdout=out, stderr=out)
            )
        try:
            yield found
        finally:
            for process in found:
                process.terminate()
            for process in found:
                process.wait()
