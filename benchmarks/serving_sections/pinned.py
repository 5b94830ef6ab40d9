"""Processes on cores of their own, and a LitServe server that is ready."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil

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
    async with child(*command), httpx.AsyncClient(timeout=STARTED_S, trust_env=False) as http:
        async with asyncio.timeout(STARTED_S):
            while True:
                try:
                    answer = await http.post(f"{url}/predict", json=body)
                    answer.raise_for_status()
                    break
                except (httpx.TransportError, httpx.HTTPStatusError):
                    await asyncio.sleep(0.2)
        pin(int(answer.json()["pid"]), core)
        yield url
