"""What a process of a job opens of what the job names, as its node was started with (ADR-0035)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from bus.connection import Bus
from bus.files.artifacts import SCHEME, Artifacts, open_artifacts, restrict
from schemas.urls import UrlRules


def restrict_urls(allowed: Sequence[str] | None) -> None:
    """`allowed`: the node's `--allow-url`; None: whatever the job names."""
    if allowed is not None:
        restrict(UrlRules.of(allowed, os.getcwd()))


async def open_url(url: str, bus: Bus) -> Artifacts:
    """`open_artifacts`, off the event loop: to look where a path or a host leads may take for ever."""
    if url.startswith(SCHEME):
        return open_artifacts(url, bus)
    return await asyncio.to_thread(open_artifacts, url, bus)
