"""The parts shared by the short-lived workers: one answer in a file, one connection if needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from bus.connection import Bus
from bus.files.artifacts import SCHEME
from bus.wire import secret_urls
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from workers.process.url_rules import restrict_urls
from workers.user_code import describe


def answer(
    work: Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]],
    payload: dict[str, Any],
    result: Path | None,
) -> int:
    """Writes the result of `work(payload)`, or {"failed": {"code", "text"}}.

    Without a file it goes to standard output. There must always be an answer, since the orchestrator waits
    for it. Returns the exit status, 0.

    Args:
        work: The task. It sees secrets, and may open URLs, as the `secrets` and `urls` of its payload say.
        payload: The order's content.
        result: The file to write.
    """
    try:
        secret_urls.learn(payload.get("secrets", ""))
        restrict_urls(payload.get("urls"))
        content = asyncio.run(work(payload))
    except DmscError as error:
        content = {"failed": {"code": error.code, "text": error.text}}
    except Exception as error:  # user code may raise anything
        content = {"failed": {"code": DmscError.code, "text": f"the worker failed: {describe(error)}"}}
    text = json.dumps(content)
    if result is None:
        print(text)
        return 0
    temporary = result.with_name(f".{result.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(result)
    return 0


@contextlib.asynccontextmanager
async def bus_for(payload: dict[str, Any], *urls: str) -> AsyncIterator[Bus | None]:
    """A connection to the bus if one of `urls` is there, by `servers`, `sid` and `token` of the payload."""
    if not any(url.startswith(SCHEME) for url in urls):
        yield None
        return
    async with Bus.connect(
        payload["servers"], name=payload["sid"], kind=EntityKind.INSTANCE, token=payload.get("token")
    ) as bus:
        yield bus
