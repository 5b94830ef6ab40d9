"""The other end of `user_models/gated.py`: passes of chosen processes are held until they are let go."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import PATIENCE_S
from workers.graph.randomness import layer_seed

LAYERS = 3


@dataclass(eq=False)
class Hold:
    """Passes of some processes in one direction wait here in one step, each in turn, until `open`."""

    pids: frozenset[int]
    direction: str
    step: int
    before: int = 0
    """Microbatches that go on: the next one is the first to wait."""
    microbatch: int | None = None
    """Which one was the first to wait."""
    _seen: set[int] = field(default_factory=set)
    _reached: asyncio.Event = field(default_factory=asyncio.Event)
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    async def reached(self) -> int:
        """Returns once a pass waits: the number of its microbatch."""
        async with asyncio.timeout(PATIENCE_S):
            await self._reached.wait()
        assert self.microbatch is not None
        return self.microbatch

    def open(self) -> None:
        self._opened.set()

    async def arrive(self, microbatch: int) -> None:
        self._seen.add(microbatch)
        if len(self._seen) <= self.before:
            return
        if not self._reached.is_set():
            self.microbatch = microbatch
            self._reached.set()
        await self._opened.wait()


class Gates:
    """`async with gates_at(path, training) as gates`."""

    def __init__(self, seed: int, steps: int, microbatches: int) -> None:
        self._holds: list[Hold] = []
        self._begun = asyncio.Event()
        self._begun.set()
        self._last = 0
        self._work = {
            layer_seed(seed, step, microbatch, layer): (step, microbatch)
            for step in range(steps)
            for microbatch in range(microbatches)
            for layer in range(LAYERS)
        }

    def close(self, after: int = 0) -> None:
        """No pass of a step behind this one goes on until `begin`: whoever wants to hold one is in time."""
        waiting, self._begun, self._last = self._begun, asyncio.Event(), after
        waiting.set()  # they look again

    def begin(self) -> None:
        self._begun.set()

    def hold(self, pid: int, *pids: int, direction: str, step: int, before: int = 0) -> Hold:
        """From now on; whoever is past it already is not held."""
        hold = Hold(frozenset((pid, *pids)), direction, step, before)
        self._holds.append(hold)
        return hold

    def open_all(self) -> None:
        self.begin()
        for hold in self._holds:
            hold.open()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One process."""
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):  # the end of the test
            while line := await reader.readline():
                pid, direction, seed = line.decode().split()
                step, microbatch = self._work.get(int(seed), (-1, -1))  # not a step's: the analysis
                while step > self._last and not self._begun.is_set():  # the analysis draws as step 0 does
                    await self._begun.wait()
                for hold in self._holds:
                    if int(pid) in hold.pids and (hold.direction, hold.step) == (direction, step):
                        await hold.arrive(microbatch)
                writer.write(b"+")
        writer.close()


@contextlib.asynccontextmanager
async def gates_at(path: Path, training: Mapping[str, int]) -> AsyncIterator[Gates]:
    """For a job with these `seed`, `steps` and `microbatches`. At the end all are let go."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    gates = Gates(training["seed"], training["steps"], training["microbatches"])
    server = await asyncio.start_unix_server(gates.serve, path)
    confined = await asyncio.start_server(gates.serve, "127.0.0.1", 0)  # may reach no Unix socket
    port = path.with_name(f"{path.name}.port")
    port.write_text(str(confined.sockets[0].getsockname()[1]))
    try:
        yield gates
    finally:
        gates.open_all()
        server.close()
        confined.close()
        port.unlink()
        os.unlink(path)
