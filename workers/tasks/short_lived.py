"""The parts shared by the short-lived workers: one answer in a file, one connection if needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from bus.connection import Bus
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from workers.user_code import describe


def answer(ask: Callable[[], dict[str, Any]], result: Path | None) -> int:
    """Writes the result of `ask`, or {"failed": {"code", "text"}}; to standard output without a file.

    There must always be an answer, since the orchestrator waits for it. Returns the exit status, 0.
    """
    try:
        content = ask()
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


def connect(payload: dict[str, Any]) -> AbstractAsyncContextManager[Bus]:
    """The worker's own connection to the bus, from `servers`, `sid` and `token` of its payload."""
    return Bus.connect(
        payload["servers"],
        name=payload["sid"],
        kind=EntityKind.INSTANCE,
        token=payload.get("token"),
    )
