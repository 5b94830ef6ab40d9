"""Child processes that speak in JSON lines, counts of what a process holds, instances on one connection."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from schemas.envelope import EntityKind
from tests.conftest import Connect
from tests.integration.workers.exchanging import Instance, Make

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Child:
    """A process that prints one JSON object per line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    async def event(self, name: str, timeout_s: float = 45.0) -> dict[str, Any]:
        """The next event of that name."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"the child ended before it said {name!r}"
                said: dict[str, Any] = json.loads(line)
                if said["event"] == name:
                    return said

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


Spawn = Callable[..., Awaitable[Child]]


@pytest_asyncio.fixture
async def spawn() -> AsyncIterator[Spawn]:
    """`child = await spawn("link_peer.py", url, …)`; killed at the end of the test."""
    children: list[Child] = []

    async def start(script: str, *args: object) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).parent / script),
            *(str(arg) for arg in args),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        children.append(Child(process))
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

    async def nothing_more(self, timeout_s: float = 5.0) -> None:
        """Fails unless everything since has been given back: joined threads may take a moment to vanish."""
        async with asyncio.timeout(timeout_s):
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
