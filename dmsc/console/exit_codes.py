"""The exit codes of every `dmsc` command, for scripts. `dmsc --help` shows the same table."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.errors import BadInput, DmscError


class ExitCode(IntEnum):
    """The meaning of a command's exit status."""

    OK = 0
    FAILED = 1  # the job failed, or an error occurred that other input would not avoid
    BAD_INPUT = 2  # wrong usage, a bad job file, a taken port, a name that does not exist
    UNREACHABLE = 3  # no mesh, no server, no gateway: retry later or start one
    REFUSED = 4  # the request was valid, but the token or the role does not permit it
    INTERRUPTED = 130  # Ctrl-C
    TERMINATED = 143  # a node agent of `dmsc up` that ended at a signal; it is started again


def exit_code_of(error: DmscError) -> ExitCode:
    """Return the exit code for an error."""
    from schemas import errors

    if isinstance(error, errors.BadInput | errors.NotFound):
        return ExitCode.BAD_INPUT
    if isinstance(error, errors.Unavailable):
        return ExitCode.UNREACHABLE
    if isinstance(error, errors.Refused):
        return ExitCode.REFUSED
    return ExitCode.FAILED


def bad_input(text: str) -> BadInput:
    """The error for input that is wrong; raise it. Commands that raise it start without the schemas."""
    from schemas.errors import BadInput

    return BadInput(text)
