"""Fixtures that every layer of tests uses: a real nats-server and connections to it."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import structlog

from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from schemas.envelope import EntityKind
from tests import cpu_by_file
from tests.patience import PATIENCE_S
from tests.warm_processes import share_incubator

Connect = Callable[..., Awaitable[Bus]]

# Of torch, before it is imported, here and in every process that tests start: models are tiny, there are more
# processes than cores, and threads that wait for one another spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("dmsc", deadline=None)  # the time that an example takes is the machine's
hypothesis.settings.load_profile("dmsc")


def pytest_configure(config: pytest.Config) -> None:
    """Test processes beside each other share one import of torch for their meshes; all count CPU seconds.

    While a process collects, nothing becomes garbage, and the search for it took a quarter of the time.
    """
    cpu_by_file.register(config)
    # Services in this process log as structlog does by default, but without rich tracebacks of CPU seconds.
    *processors, _ = structlog.get_config()["processors"]
    console = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*processors, console])
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        share_incubator()
    else:
        gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One nats-server per test module, in a folder of its own."""
    embedded = EmbeddedServer(tmp_path_factory.mktemp("nats"), sync_always=False)
    asyncio.run(embedded.start())
    try:
        yield embedded
    finally:
        asyncio.run(embedded.stop())


@pytest.fixture
def nats_url(server: EmbeddedServer) -> str:
    return server.url


@pytest_asyncio.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A nats-server of this test alone, to be stopped, killed and restarted."""
    async with EmbeddedServer(tmp_path / "nats", sync_always=False) as embedded:
        yield embedded


@pytest_asyncio.fixture
async def connect(server: EmbeddedServer) -> AsyncIterator[Connect]:
    """`bus = await connect("name", EntityKind.CLIENT)`: connected, provisioned, closed at the end."""
    async with AsyncExitStack() as stack:

        async def make(name: str, kind: EntityKind = EntityKind.CLIENT, **options: Any) -> Bus:
            url = options.pop("url", server.url)
            provision = options.pop("provision", True)
            options.setdefault("connect_timeout_s", PATIENCE_S)
            bus = await stack.enter_async_context(Bus.connect(url, name=name, kind=kind, **options))
            if provision:
                await bus.provision()
            return bus

        yield make
