"""From a command to the event loop and back to an exit code; errors become one line."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from dmsc.console.exit_codes import ExitCode, exit_code_of

if TYPE_CHECKING:
    from dmsc.client.async_client import AsyncClient

T = TypeVar("T")

ANSWER_S = 20.0
"""How long a command waits for one answer of a gateway: longer than an orchestrator's failover."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. Being cancelled by a signal ends the command with code 130.

    Log lines go to standard error, unless the command has said otherwise: what a script reads on standard
    output is the answer and nothing else.
    """
    from bus.logs import log_for_people

    log_for_people()
    try:
        return asyncio.run(work)
    except (asyncio.CancelledError, KeyboardInterrupt):
        leave(ExitCode.INTERRUPTED)


def ask_gateway(
    gateway: str | None,
    token: str | None,
    state: Path | None,
    ask: Callable[[AsyncClient], Awaitable[T]],
) -> T:
    """Run a command that is one conversation with a gateway, as the command's options name it."""
    from dmsc.client.async_client import AsyncClient

    async def talk() -> T:
        async with AsyncClient(gateway, token=token, state=state, timeout_s=ANSWER_S) as client:
            return await ask(client)

    return run_async(talk())


def leave(code: ExitCode) -> NoReturn:
    """End the command with this code."""
    import typer

    raise typer.Exit(int(code))


def report(error: BaseException) -> ExitCode:
    """Say in one line (per problem) what went wrong; `DMSC_DEBUG=1` adds the traceback."""
    from schemas.errors import DmscError
    from schemas.plain_text import plain

    if os.environ.get("DMSC_DEBUG"):
        traceback.print_exception(error)
    found = _first(error, DmscError)
    if isinstance(found, DmscError):
        for line in found.text.splitlines() or [found.code]:
            print(f"dmsc: {plain(line)}", file=sys.stderr)
        return exit_code_of(found)
    text = plain(" ".join(str(error).split())) or "no message"
    print(
        f"dmsc: internal error: {type(error).__name__}: {text} (DMSC_DEBUG=1 shows where)",
        file=sys.stderr,
    )
    return ExitCode.FAILED


def _first(error: BaseException, wanted: type[BaseException]) -> BaseException | None:
    """The first error of the wanted class in a (group of) errors and their causes."""
    if isinstance(error, wanted):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(
            (found for inner in error.exceptions if (found := _first(inner, wanted)) is not None), None
        )
    return None
