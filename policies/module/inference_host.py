"""Inference in a process of its own (draft §4.2): a model may import torch, take seconds, crash or hang.

A policy provides `model`, which that process calls once, and requests inferences after each decision; the
results come to `on_inference` like events. Neither the bus nor the policy's own thread waits, and the
module's process never imports the model's dependencies. A process that dies or does not answer is ended,
counted and started again; after `max_failures` in a row the module is suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bus.logs import get_logger
from policies.kit.inference import Inference, Inferred
from policies.kit.policy import Policy
from policies.module.inference_process import FRAME
from schemas.errors import BadInput

log = get_logger("module")


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceConfig:
    """Bounds on one module's model."""

    start_s: float = 60.0
    """Seconds that `model` may take: it may import torch and read weights."""

    answer_s: float = 5.0
    """Seconds that one inference may take; then its process is ended. A longer time detects a hang later."""

    waiting: int = 256
    """Most inferences that wait; beyond it the oldest are dropped and counted."""

    pause_s: float = 0.5
    """Seconds until a process is started again; doubled with each failure in a row, up to 16 times."""

    end_s: float = 1.0
    """Seconds to wait for the pipes of a process that was ended."""

    max_failures: int = 5
    """Failures in a row after which the module is suspended."""

    def __post_init__(self) -> None:
        if min(self.start_s, self.answer_s, self.pause_s) <= 0 or self.waiting < 1 or self.max_failures < 1:
            raise BadInput("inference settings: times must be above 0, waiting and max_failures at least 1")


@dataclass(slots=True)
class InferenceCounters:
    """Counts since the start; whole numbers that only grow. `left_out`: replaced, or too many waited."""

    inferred: int = 0
    failed: int = 0
    left_out: int = 0
    starts: int = 0


class _Failed(Exception):
    """An inference or the process failed; the text says how. `alive`: the process can go on."""

    def __init__(self, text: str, *, alive: bool = False) -> None:
        super().__init__(text)
        self.alive = alive


class InferenceProcess:
    """One policy's model. `done` gets each result; `failed` is called after too many failures in a row."""

    def __init__(
        self,
        policy: type[Policy],
        config: InferenceConfig,
        done: Callable[[Inferred], None],
        failed: Callable[[str], None],
    ) -> None:
        self.counters = InferenceCounters()
        self._policy = policy
        self._config = config
        self._done = done
        self._failed = failed
        self._waiting: dict[tuple[str, str], Inference] = {}
        self._available = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._reported: set[str] = set()

    def start(self, inferences: list[Inference]) -> None:
        """Queues inferences, which are carried out one after the other."""
        for inference in inferences:
            key = (inference.job, inference.key)
            self.counters.left_out += self._waiting.pop(key, None) is not None
            self._waiting[key] = inference
        while len(self._waiting) > self._config.waiting:
            del self._waiting[next(iter(self._waiting))]
            self.counters.left_out += 1
        if self._waiting:
            self._available.set()

    async def run(self) -> None:
        """Carries out inferences until cancelled; after too many failures, waits for a new request first."""
        in_a_row = 0
        try:
            while True:
                try:
                    await self._next()
                    in_a_row = 0
                except _Failed as failure:
                    in_a_row += 1
                    await self._handle_failure(str(failure), ended=not failure.alive, in_a_row=in_a_row)
                    if in_a_row == self._config.max_failures:
                        self._failed(f"suspended after {in_a_row} failed inferences, the last: {failure}")
                        self._waiting.clear()
                        self._available.clear()
                        await self._available.wait()
                        in_a_row = 0
        finally:
            await self._end()

    async def _next(self) -> None:
        process = self._process or await self._start_process()
        await self._available.wait()
        inference = self._waiting.pop(next(iter(self._waiting)))
        if not self._waiting:
            self._available.clear()
        started_at = time.monotonic()
        value = await self._exchange(process, inference.inputs, self._config.answer_s)
        self.counters.inferred += 1
        self._done(Inferred(inference.job, inference.key, value, time.monotonic() - started_at))

    async def _start_process(self) -> asyncio.subprocess.Process:
        """Starts the process and has it make its model."""
        self.counters.starts += 1
        process = self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "policies.module.inference_process", str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        module = sys.modules[self._policy.__module__]
        where = (module.__name__, getattr(module, "__file__", None), self._policy.__qualname__)
        try:
            await self._exchange(process, where, self._config.start_s)
        except _Failed as failure:
            raise _Failed(f"no model: {failure}") from None
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, inputs: Any, timeout_s: float) -> Any:
        """Sends one frame and receives one frame.

        Raises:
            _Failed: The model raised; the process ended, or did not answer in time.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            data = pickle.dumps(inputs, protocol=5)
        except Exception as error:
            raise _Failed(f"inputs can't be pickled: {error}", alive=True) from None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(FRAME.pack(len(data)) + data)
                await process.stdin.drain()
                (size,) = FRAME.unpack(await process.stdout.readexactly(FRAME.size))
                ok, value = pickle.loads(await process.stdout.readexactly(size))
        except TimeoutError:
            raise _Failed(f"no answer for {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            raise _Failed(f"its process ended with {_code(code)}") from None
        if not ok:
            raise _Failed(value, alive=True)
        return value

    async def _handle_failure(self, text: str, *, ended: bool, in_a_row: int) -> None:
        self.counters.failed += 1
        if text not in self._reported and len(self._reported) < 100:
            self._reported.add(text)
            log.error("inference failed", module=self._policy.name, reason=text)
        if ended:
            await self._end()
            await asyncio.sleep(self._config.pause_s * min(16, 2 ** (in_a_row - 1)))

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):  # its pipes end with it, unless child processes hold them
            async with asyncio.timeout(self._config.end_s):
                await process.communicate(b"")  # closes our end, reads the other to its end
        await process.wait()


def _code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
