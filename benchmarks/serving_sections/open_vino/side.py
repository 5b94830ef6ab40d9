"""The child that computes with OpenVINO GenAI, and what it is asked."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.emptiness import NothingMeasured

ROOT = Path(__file__).parents[3]
CHILD = f"{__package__}.child"
NAME = "OpenVINO GenAI"
REMEDY = "pip install 'dmsc[bench-openvino]' into an interpreter of its own, and --openvino-python its path"


@dataclass
class OpenVino:
    """A child that is ready. `version`: of OpenVINO GenAI; `equal`, `of`: tokens that are transformers'."""

    process: Process
    version: str = ""
    equal: int = 0
    of: int = 0

    async def answer(self, prompts: Sequence[list[int]], tokens: int, *, check: bool = False) -> float:
        """Greedy answers to all prompts at once: seconds of CPU that the child took for them.

        Args:
            prompts: Of tokens.
            tokens: Of each answer.
            check: Whether the child compares them with transformers' afterwards (`equal`, `of`).

        Raises:
            NothingMeasured: It failed, or an answer has another count of tokens.
        """
        assert self.process.stdin is not None
        line = json.dumps({"prompts": [list(prompt) for prompt in prompts], "tokens": tokens, "check": check})
        with suppress(ConnectionError):  # what it said last is read below
            self.process.stdin.write(f"{line}\n".encode())
            await self.process.stdin.drain()
        told = await self.heard()
        if told["lengths"] != [tokens] * len(prompts):
            raise NothingMeasured(f"{NAME} gave other counts of tokens than it was asked for")
        self.equal, self.of = told.get("equal", self.equal), told.get("of", self.of)
        return float(told["cpu_s"])

    async def heard(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        if not (line := await self.process.stdout.readline()):
            raise NothingMeasured(f"{NAME} ended with {await self.process.wait()}")
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise NothingMeasured(f"{NAME}: {told['error'][:200]}", remedy=REMEDY)
        return told


@asynccontextmanager
async def open_vino(python: Path, config: dict[str, Any], rows: int) -> AsyncIterator[OpenVino]:
    """A child that has exported the model and is ready; gone after the block, with its files.

    Args:
        python: Its interpreter.
        config: Of the Llama.
        rows: Most tokens of a wave.

    Raises:
        NothingMeasured: It does not start, for instance because OpenVINO GenAI is not installed there.
    """
    with TemporaryDirectory(prefix="dmsc-openvino-") as folder:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        settings = json.dumps({"config": config, "rows": rows, "folder": folder})
        try:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-m", CHILD, settings),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as error:
            raise NothingMeasured(f"--openvino-python {python}: {error.strerror}", remedy=REMEDY) from None
        try:
            made = OpenVino(process)
            made.version = (await made.heard())["version"]
            yield made
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
