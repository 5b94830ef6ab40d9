"""Starts the process of a fork server: forked from the machine's incubator if there is one, else afresh.

The incubator (`workers/process/incubator.py`) is a preloaded fork server that has imported torch already. Its
name is in `DMSC_INCUBATOR`, which `dmsc up` sets for its node agents. If it fails, that costs only the time
of an import.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bus.logs import get_logger
from entities.cluster.prefork_client import fork_from

INCUBATOR = "DMSC_INCUBATOR"
"""Environment variable with the name of the incubator's abstract Unix socket."""

SECRETS = ("DMSC_BUS_TOKEN", "DMSC_TOKEN", INCUBATOR)
"""Environment variables that instances do not inherit; they inherit the rest."""

_CODE_ROOT = Path(__file__).resolve().parent.parent.parent  # the folder that holds our packages

log = get_logger("cluster")


class ForkServerProcess:
    """A fork server's process, running or ended. It has a pidfd, or is this process's own child."""

    def __init__(
        self, pid: int, handle: int | None = None, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self._handle = handle
        self._child = child

    def kill_group(self) -> None:
        """Send SIGKILL to the server and all of its children."""
        if self._child is None and self._ended(0.0):
            return  # its children have ended with it, and the group id may be reused by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended; a second call returns at once."""
        if self._child is not None:
            self._child.wait()
        elif self._handle is not None:
            self._ended(None)
            os.close(self._handle)
            self._handle = None

    def _ended(self, timeout_s: float | None) -> bool:
        if self._handle is None:
            return True
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


async def start(
    arguments: Sequence[str], channel: int, output: int, *, answer_s: float = 60.0
) -> ForkServerProcess:
    """Run `python -m workers.process.fork_server ARGUMENTS` in a session of its own.

    Args:
        arguments: without `--fd`.
        channel: file descriptor of its end of the socket to this process.
        output: file descriptor for its output.
        answer_s: limit for the incubator's answer: it imports torch before the first one; later ones take
            milliseconds.

    Raises:
        OSError: the system starts no process.
    """
    environment = {
        # users' code runs there: it gets its instance's own credential, never the agent's
        **{key: value for key, value in os.environ.items() if key not in SECRETS},
        **threads_environment(),
    }
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by deterministic cuBLAS
    name = os.environ.get(INCUBATOR)
    if name and sys.platform == "linux":
        try:
            async with asyncio.timeout(answer_s):
                return await _fork_from_incubator(name, arguments, environment, channel, output)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer in {answer_s:.0f} s"
            log.warning("the incubator is of no use: the fork server is started afresh", why=why)
    child = subprocess.Popen(  # noqa: ASYNC220  # it only forks and executes
        [sys.executable, "-m", "workers.process.fork_server", "--fd", str(channel), *arguments],
        cwd=_CODE_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(channel,),
        start_new_session=True,  # Ctrl-C must reach the agent alone; and the group can be killed as one
    )
    return ForkServerProcess(child.pid, child=child)


def threads_environment() -> dict[str, str]:
    """Environment variables that must be set before numpy and torch are imported."""
    return {
        "OPENBLAS_NUM_THREADS": "1",  # numpy would start its pool on import: no fork after that
        "OMP_DYNAMIC": "FALSE",  # the number of threads changes bits: only the job chooses it
        "MKL_DYNAMIC": "FALSE",
    }


async def _fork_from_incubator(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], channel: int, output: int
) -> ForkServerProcess:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as incubator:
        incubator.setblocking(False)
        await loop.sock_connect(incubator, "\0" + name)
        return ForkServerProcess(*await fork_from(incubator, arguments, environment, output, channel))
