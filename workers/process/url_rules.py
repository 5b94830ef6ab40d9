"""Which URLs of its job a process may open, by the options of its node (ADR-0035)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from bus.connection import Bus
from bus.files.artifacts import SCHEME, Artifacts, open_artifacts, restrict
from schemas.urls import UrlRules


def restrict_urls(allowed: Sequence[str] | None) -> None:
    """Restricts this process to the URLs of the node's `--allow-url`; None: no restriction."""
    if allowed is not None:
        restrict(UrlRules.of(allowed, os.getcwd()))


async def open_url(url: str, bus: Bus) -> Artifacts:
    """Calls `open_artifacts` off the event loop, since resolving a path or a host may block for ever."""
    if url.startswith(SCHEME):
        return open_artifacts(url, bus)
    return await asyncio.to_thread(open_artifacts, url, bus)
