"""The process of a fork server: forked from the machine's incubator if there is one, else started afresh.

The incubator (`workers/process/incubator.py`) has imported torch already. It is found by `DMSC_INCUBATOR`,
which `dmsc up` sets for its node agents; whatever is wrong with it costs the time of an import, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bus.logs import get_logger

INCUBATOR = "DMSC_INCUBATOR"
"""Name of its abstract Unix socket."""

SECRETS = ("DMSC_BUS_TOKEN", "DMSC_TOKEN", INCUBATOR)
"""Of our own environment; instances inherit the rest."""

_ANSWER_S = 60.0
"""For the incubator's first answer, before which it imports torch; afterwards it takes milliseconds."""
_LENGTH = struct.Struct("!I")
_PID = struct.Struct("!i")
_OURS = Path(__file__).resolve().parent.parent.parent  # the folder that holds our packages

log = get_logger("cluster")


class ForkServerProcess:
    """One that runs, or has ended: known by its pidfd, or, where there are none, as our own child."""

    def __init__(
        self, pid: int, handle: int | None = None, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self._handle = handle
        self._child = child

    def kill_group(self) -> None:
        """SIGKILL to it and to all that it started."""
        if self._child is None and self._ended(0.0):
            return  # its children have ended with it, and the id may be another group's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Returns when it has ended; twice is fine."""
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


async def start(arguments: Sequence[str], channel: int, output: int) -> ForkServerProcess:
    """`python -m workers.process.fork_server ARGUMENTS` in a session of its own.

    Args:
        arguments: without `--fd`.
        channel: its end of the socket to us.
        output: file that gets what it prints.

    Raises:
        OSError: the system gives no process.
    """
    environment = {
        # users' code runs there: it gets its instance's own credential, and none of ours
        **{key: value for key, value in os.environ.items() if key not in SECRETS},
        **threads_environment(),
    }
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic cuBLAS asks for
    name = os.environ.get(INCUBATOR)
    if name and sys.platform == "linux":
        body = json.dumps([list(arguments), environment, str(_OURS)]).encode()
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await _hatched(name, body, channel, output)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer in {_ANSWER_S:.0f} s"
            log.warning("the incubator is of no use: the fork server is started afresh", why=why)
    child = subprocess.Popen(  # noqa: ASYNC220  # it only forks and executes
        [sys.executable, "-m", "workers.process.fork_server", "--fd", str(channel), *arguments],
        cwd=_OURS,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(channel,),
        start_new_session=True,  # a Ctrl-C is the agent's alone; and there is one group to kill
    )
    return ForkServerProcess(child.pid, child=child)


def threads_environment() -> dict[str, str]:
    """What has to be set before numpy and torch are imported."""
    return {
        "OPENBLAS_NUM_THREADS": "1",  # numpy would start its pool on import: no fork after that
        "OMP_DYNAMIC": "FALSE",  # the number of threads changes bits: nobody but the job chooses it
        "MKL_DYNAMIC": "FALSE",
    }


async def _hatched(name: str, body: bytes, channel: int, output: int) -> ForkServerProcess:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as incubator:
        incubator.setblocking(False)
        await loop.sock_connect(incubator, "\0" + name)
        socket.send_fds(incubator, [_LENGTH.pack(len(body))], [channel, output])
        await loop.sock_sendall(incubator, body)
        readable = asyncio.Event()
        loop.add_reader(incubator, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(incubator)
        answer, handles, _, _ = socket.recv_fds(incubator, _PID.size, 1)
    if not handles:
        raise OSError("it could fork none" if answer else "it has ended")
    return ForkServerProcess(_PID.unpack(answer)[0], handle=handles[0])
