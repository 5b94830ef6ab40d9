"""Machines as node agents that run as processes of this machine, for a laptop, a workstation, and tests.

A machine is a file in a folder, which its process holds locked from before its start until its end. So
whoever orders it again, after a crash or at the same time, finds it taken, and no pid has to be believed.
Processes go on when the provisioner ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.base import is_token
from schemas.errors import Refused, Unavailable

LOCK = ".machine"
"""The suffix of the file that a machine's process holds."""
SAYS_ITS_PID = 'echo $$ > "$0"; exec "$@"'
"""The first thing that the new process does: it writes its pid into the file that it holds."""


class LocalDriver:
    """The machines of one pool, as processes.

    Args:
        folder: where their files are; only of this mesh.
        command: what is run; `{machine}` in it stands for the machine's name.
        environment: of these processes, beside the present one.
        stop_s: how long a process has to end before it is killed.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], environment: Mapping[str, str], *, stop_s: float = 15.0
    ) -> None:
        self._folder = folder
        self._command = tuple(command)
        self._environment = dict(environment)
        self._stop_s = stop_s

    @property
    def idempotent(self) -> bool:
        return True

    async def order(self, machine: str) -> None:
        await asyncio.to_thread(self._order, machine)

    def _order(self, machine: str) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            held = os.open(self._file(machine), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refused(f"{self._folder}: {error.strerror}") from None
        try:
            if not _lock(held):
                return  # it is there already
            if not self._is_file_of(held, machine):
                raise Unavailable(f"{machine}: its file was removed at this moment: order it again")
            os.ftruncate(held, 0)
            with (self._folder / f"{machine}.log").open("ab") as log:
                subprocess.Popen(  # it outlives this process, and is known by its lock
                    ("/bin/sh", "-c", SAYS_ITS_PID, str(self._file(machine)), *self._words(machine)),
                    env={**os.environ, **self._environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(held,),
                    start_new_session=True,
                )
        except OSError as error:
            raise Refused(f"{machine}: {error.strerror}") from None
        finally:
            os.close(held)

    async def release(self, machine: str) -> None:
        """Ends the process; it has `stop_s` for that."""
        if (pid := self._pid(machine)) is None:
            if self._is_there(machine):
                raise Unavailable(f"{machine} has not said its pid yet")
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_s):
                while self._is_there(machine):
                    _reap(pid)
                    await asyncio.sleep(0.05)
                return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _reap(pid)

    async def machines(self) -> frozenset[str]:
        return await asyncio.to_thread(self._machines)

    def _machines(self) -> frozenset[str]:
        found = set()
        for file in self._folder.glob(f"*{LOCK}"):
            machine = file.name.removesuffix(LOCK)
            if (pid := self._written_pid(file)) is not None:
                _reap(pid)
            if self._is_there(machine, forget=True):
                found.add(machine)
        return frozenset(found)

    def _words(self, machine: str) -> list[str]:
        return [word.replace("{machine}", machine) for word in self._command]

    def _is_file_of(self, held: int, machine: str) -> bool:
        """Whether an open file is still the machine's."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(held), self._file(machine).stat())
        return False

    def _file(self, machine: str) -> Path:
        if not is_token(machine):
            raise Refused(f"{machine!r} is no machine's name")
        return self._folder / f"{machine}{LOCK}"

    def _is_there(self, machine: str, *, forget: bool = False) -> bool:
        """Whether a process holds the machine's file; one that nobody holds is removed, with `forget`."""
        try:
            held = os.open(self._file(machine), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if not _lock(held):
                return True
            if forget and self._is_file_of(held, machine):  # held: nobody orders it at this moment
                self._file(machine).unlink(missing_ok=True)
            return False
        finally:
            os.close(held)

    def _pid(self, machine: str) -> int | None:
        """The pid of the process that holds the machine's file; None: none does, or it has not said yet."""
        return self._written_pid(self._file(machine)) if self._is_there(machine) else None

    def _written_pid(self, file: Path) -> int | None:
        try:
            return int(file.read_text().strip() or 0) or None
        except (OSError, ValueError):
            return None


def _lock(held: int) -> bool:
    """Takes the lock of an open file; False: another process has it."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _reap(pid: int) -> None:
    """Takes notice of a child that has ended; of others the system's first process does."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
