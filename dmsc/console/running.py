"""Runs a command's coroutine and turns its outcome into an exit code; each error becomes one line."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from dmsc.console.exit_codes import ExitCode, exit_code_of

T = TypeVar("T")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine. If a signal cancels it, the command ends with code 130.

    Log lines go to standard error, unless the command has configured logging itself, so that a script reads
    nothing but the answer on standard output.
    """
    from bus.logs import log_for_people

    log_for_people()
    try:
        return asyncio.run(work)
    except (asyncio.CancelledError, KeyboardInterrupt):
        leave(ExitCode.INTERRUPTED)


def leave(code: ExitCode) -> NoReturn:
    """End the command with this exit code."""
    import typer

    raise typer.Exit(int(code))


def report(error: BaseException) -> ExitCode:
    """Print what went wrong, one line per problem, and return the exit code.

    `DMSC_DEBUG=1` adds the traceback.
    """
    from schemas.errors import DmscError
    from schemas.plain_text import plain

    if os.environ.get("DMSC_DEBUG"):
        traceback.print_exception(error)
    cause = _first(error, DmscError)
    if isinstance(cause, DmscError):
        for line in cause.text.splitlines() or [cause.code]:
            print(f"dmsc: {plain(line)}", file=sys.stderr)
        return exit_code_of(cause)
    text = plain(" ".join(str(error).split())) or "no message"
    print(
        f"dmsc: internal error: {type(error).__name__}: {text} (DMSC_DEBUG=1 shows where)",
        file=sys.stderr,
    )
    return ExitCode.FAILED


def _first(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The first error of this class: the error itself, or one in its exception group."""
    if isinstance(error, kind):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((match for inner in error.exceptions if (match := _first(inner, kind)) is not None), None)
    return None
