"""Processes on cores of their own, and a LitServe server that is ready."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import psutil

from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.harness.processes import child

STARTED_S = 90.0
MISSING = "LitServe is not installed: pip install 'dmsc[bench-serving]'"


def lit_is_installed() -> bool:
    return importlib.util.find_spec("litserve") is not None


def pin(pid: int, core: int) -> None:
    """Keep all threads of a process on one core."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, {core})


@asynccontextmanager
async def lit_server(settings: Mapping[str, Any], body: Any, core: int) -> AsyncIterator[str]:
    """The URL of a LitServe server (`lit_server.py`) whose computing process is pinned; gone after the block.

    `body`: of a first request, which is sent until it is answered.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = ("-m", "benchmarks.serving_sections.lit_server", str(port), json.dumps(settings))
    async with child(*command) as server, httpx.AsyncClient(timeout=STARTED_S, trust_env=False) as http:
        try:
            pin(await _computing(http, server, url, body), core)
            yield url
        finally:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(server.pid).children(recursive=True):
                    process.kill()  # its workers stay where it alone is terminated


async def _computing(http: httpx.AsyncClient, server: Process, url: str, body: Any) -> int:
    """The pid of the process that computes, once it answers.

    Raises:
        NothingMeasured: It does not, within `STARTED_S`.
    """
    said = "no connection"
    try:
        async with asyncio.timeout(STARTED_S):
            while server.returncode is None:
                try:
                    answer = await http.post(f"{url}/predict", json=body)
                    answer.raise_for_status()
                    return int(answer.json()["pid"])
                except (httpx.TransportError, httpx.HTTPStatusError) as error:
                    said = str(error) or type(error).__name__
                    await asyncio.sleep(0.2)
    except TimeoutError:
        raise NothingMeasured(f"LitServe does not answer within {STARTED_S:g} s: {said}") from None
    raise NothingMeasured(f"LitServe ended with {server.returncode} while starting: {said}")
