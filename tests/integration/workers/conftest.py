"""Child processes that speak in JSON lines, counts of what a process holds, instances on one connection."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
from asyncio import ReadTransport as Transport
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from schemas.envelope import EntityKind
from tests import warm_processes
from tests.conftest import Connect
from tests.integration.workers.exchanging import Instance, Make
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Child:
    """A process that prints one JSON object per line."""

    def __init__(self, process: ForkServerProcess, reader: asyncio.StreamReader, pipe: Transport) -> None:
        assert process.pid is not None
        self._process, self._reader, self._pipe = process, reader, pipe
        self._code: int | None = None
        self.pid = process.pid

    async def event(self, name: str) -> dict[str, Any]:
        """The next event of that name."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                line = await self._reader.readline()
                assert line, f"the child ended before it said {name!r}"
                said: dict[str, Any] = json.loads(line)
                if said["event"] == name:
                    return said

    async def ended(self) -> int:
        """Its exit code; -9 after SIGKILL. Nothing of it is left then."""
        if self._code is None:
            over = asyncio.Event()
            loop, sentinel = asyncio.get_running_loop(), self._process.sentinel
            loop.add_reader(sentinel, over.set)
            await over.wait()
            loop.remove_reader(sentinel)
            self._process.join()
            assert self._process.exitcode is not None
            self._code = self._process.exitcode
            self._process.close()
            self._pipe.close()
        return self._code

    async def kill(self) -> None:
        if self._code is None:
            self._process.kill()
        await self.ended()


Spawn = Callable[..., Awaitable[Child]]


@pytest.fixture(scope="session", autouse=True)
def _peers_start_at_once() -> None:
    warm_processes.warm_up()


@pytest_asyncio.fixture
async def spawn() -> AsyncIterator[Spawn]:
    """`child = await spawn("link_peer.py", url, …)`; killed at the end of the test."""
    children: list[Child] = []

    async def start(script: str, *args: object) -> Child:
        process, output = warm_processes.start(Path(__file__).parent / script, *args)
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), output
        )
        children.append(Child(process, reader, pipe))
        return children[-1]

    yield start
    for child in children:
        await child.kill()


class Held:
    """Threads and file descriptors of this process, now and when this was made."""

    def __init__(self) -> None:
        self.before = self.now()

    @staticmethod
    def now() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    async def nothing_more(self) -> None:
        """Fails unless everything since has been given back: joined threads may take a moment to vanish."""
        async with asyncio.timeout(PATIENCE_S):
            while True:  # the kernel does not say when a thread is gone
                if all(now <= then for now, then in zip(self.now(), self.before, strict=True)):
                    return
                await asyncio.sleep(0.01)


@pytest.fixture
def held() -> type[Held]:
    return Held


@pytest.fixture(autouse=True)
def own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incarnations are unique in the wild, here only within a test: each has a job of its own."""
    monkeypatch.setattr(Instance, "job", f"job-{secrets.token_hex(4)}")


@pytest_asyncio.fixture
async def make(connect: Connect) -> AsyncIterator[Make]:
    """`instance = await make("name")`: all on one connection; closed at the end."""
    bus = await connect("instances", EntityKind.INSTANCE)
    async with AsyncExitStack() as stack:

        async def start(sid: str, incarnation: str = "1", **options: Any) -> Instance:
            instance = Instance(options.pop("bus", bus), sid, incarnation, **options)
            await stack.enter_async_context(instance.exchange)
            return instance

        yield start
