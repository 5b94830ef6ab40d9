"""The exit codes of every `dmsc` command, for scripts. The same table stands in `dmsc --help`."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schemas.errors import DmscError


class ExitCode(IntEnum):
    """What a command's exit status means."""

    OK = 0
    FAILED = 1  # the job failed, or something went wrong that no input would mend
    BAD_INPUT = 2  # usage, a bad job file, a taken port, a name that does not exist
    UNREACHABLE = 3  # no mesh, no server, no gateway: retry later or start one
    REFUSED = 4  # asked properly, not permitted: token or role
    INTERRUPTED = 130  # Ctrl-C


def exit_code_of(error: DmscError) -> ExitCode:
    """The exit code that stands for an error."""
    from schemas import errors

    if isinstance(error, errors.BadInput | errors.NotFound):
        return ExitCode.BAD_INPUT
    if isinstance(error, errors.Unavailable):
        return ExitCode.UNREACHABLE
    if isinstance(error, errors.Refused):
        return ExitCode.REFUSED
    return ExitCode.FAILED
