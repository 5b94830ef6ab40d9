"""Inference in a process of its own (draft §4.2): a model may import torch, take seconds, crash or hang.

A policy gives `model`, which that process calls once, and asks for inferences after each decision; the
results come to `on_inference` like events. Neither the bus nor the policy's own thread waits, and the
module's process never imports what the model needs. A process that dies or does not answer is ended,
counted and started again; one that only does so is the module's end.
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

END_S = 1.0
"""Seconds until the pipes of a process that was ended are given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceConfig:
    """Bounds on one module's model."""

    start_s: float = 60.0
    """Seconds that `model` may take: it may import torch and read weights."""

    answer_s: float = 5.0
    """Seconds that one inference may take until its process is ended. Longer waits longer for a hang."""

    waiting: int = 256
    """Inferences that may wait; beyond it the oldest are left out and counted."""

    pause_s: float = 0.5
    """Seconds until a process is started again; doubled with each failure in a row, to 16 times as much."""

    max_failures: int = 5
    """Failures in a row until the module is suspended."""

    def __post_init__(self) -> None:
        if min(self.start_s, self.answer_s, self.pause_s) <= 0 or self.waiting < 1 or self.max_failures < 1:
            raise BadInput("inference settings: times must be above 0, waiting and max_failures at least 1")


@dataclass(slots=True)
class InferenceCounters:
    """What happened so far; whole numbers that only grow. `left_out`: overtaken, or too many waited."""

    inferred: int = 0
    failed: int = 0
    left_out: int = 0
    starts: int = 0


class _Failed(Exception):
    """One inference, or the process, failed; the text says how. `alive`: the process can go on."""

    def __init__(self, text: str, *, alive: bool = False) -> None:
        super().__init__(text)
        self.alive = alive


class InferenceProcess:
    """One policy's model. `done` gets each result; `failed` is called when it is hopeless."""

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
        self._more = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._told: set[str] = set()

    def start(self, inferences: list[Inference]) -> None:
        """Queue them; they are carried out one after the other."""
        for one in inferences:
            key = (one.job, one.key)
            self.counters.left_out += self._waiting.pop(key, None) is not None
            self._waiting[key] = one
        while len(self._waiting) > self._config.waiting:
            del self._waiting[next(iter(self._waiting))]
            self.counters.left_out += 1
        if self._waiting:
            self._more.set()

    async def run(self) -> None:
        """Carries out until cancelled. Once it was hopeless it waits until it is asked again."""
        in_a_row = 0
        try:
            while True:
                try:
                    await self._next()
                    in_a_row = 0
                except _Failed as failure:
                    in_a_row += 1
                    await self._note(str(failure), ended=not failure.alive, in_a_row=in_a_row)
                    if in_a_row == self._config.max_failures:
                        self._failed(f"suspended after {in_a_row} failed inferences, the last: {failure}")
                        self._waiting.clear()
                        self._more.clear()
                        await self._more.wait()
                        in_a_row = 0
        finally:
            await self._end()

    async def _next(self) -> None:
        process = self._process or await self._begin()
        await self._more.wait()
        inference = self._waiting.pop(next(iter(self._waiting)))
        if not self._waiting:
            self._more.clear()
        begun = time.monotonic()
        value = await self._ask(process, inference.inputs, self._config.answer_s)
        self.counters.inferred += 1
        self._done(Inferred(inference.job, inference.key, value, time.monotonic() - begun))

    async def _begin(self) -> asyncio.subprocess.Process:
        """The process with its model made."""
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
            await self._ask(process, where, self._config.start_s)
        except _Failed as failure:
            raise _Failed(f"no model: {failure}") from None
        return process

    async def _ask(self, process: asyncio.subprocess.Process, inputs: Any, timeout_s: float) -> Any:
        """One frame out, one frame in.

        Raises:
            _Failed: the model raised; the process ended, or did not answer in time.
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

    async def _note(self, text: str, *, ended: bool, in_a_row: int) -> None:
        self.counters.failed += 1
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
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
        with contextlib.suppress(TimeoutError):  # the pipes end with it, unless it has left them to others
            async with asyncio.timeout(END_S):
                await process.communicate(b"")  # closes ours, reads theirs to the end
        await process.wait()


def _code(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
