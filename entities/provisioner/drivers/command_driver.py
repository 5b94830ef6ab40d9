"""Machines by commands of the user: a cloud's command line, a batch system, ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from schemas.base import is_token
from schemas.errors import Refused, Unavailable
from schemas.machines.pools import PoolCommands

NO_MACHINE = 69
"""The exit code (EX_UNAVAILABLE) by which an order says that there is certainly no machine."""
MOST_BYTES = 1 << 20
"""Of a command's output that are read."""
SHOWN = 300
"""Characters of what a command says that are told on."""


class CommandDriver:
    """Runs the commands of one pool, without a shell.

    Args:
        commands: what they are.
        fields: what is filled into them, but for the machine; also in their environment, as DMSC_….
        secrets: more of their environment.
        rest_s: how long the output of a command that has ended is read on, if something holds it open.
    """

    def __init__(
        self,
        commands: PoolCommands,
        fields: Mapping[str, str],
        secrets: Mapping[str, str] | None = None,
        *,
        rest_s: float = 1.0,
    ) -> None:
        self._rest_s = rest_s
        self._commands = commands
        self._fields = dict(fields)
        self._secrets = dict(secrets or {})

    @property
    def idempotent(self) -> bool:
        return self._commands.idempotent

    async def order(self, machine: str) -> None:
        code, said = await self._run(self._commands.order, "order", machine)
        if code == NO_MACHINE:
            raise Refused(f"order: {said or 'no machine can be had'}")
        if code:
            raise Unavailable(f"order ended with {code}: {said}")

    async def release(self, machine: str) -> None:
        code, said = await self._run(self._commands.release, "release", machine)
        if code:
            raise Unavailable(f"release ended with {code}: {said}")

    async def machines(self) -> frozenset[str]:
        code, said = await self._run(self._commands.list, "list", "", whole=True)
        if code:
            raise Unavailable(f"list ended with {code}: {said[:SHOWN]}")
        if len(said) >= MOST_BYTES:
            raise Unavailable(f"list: more than {MOST_BYTES:,} bytes: print the names of this pool alone")
        names = [line.split()[0] for line in said.splitlines() if line.strip()]
        if strange := next((name for name in names if not is_token(name)), None):
            raise Unavailable(
                f"list: {strange[:60]!r} is no machine's name: print one a line, and nothing else"
            )
        return frozenset(names)

    async def _run(
        self, words: Sequence[str], what: str, machine: str, *, whole: bool = False
    ) -> tuple[int, str]:
        """The exit code, and what it printed: all of its output, or the last line of what it complained.

        Raises:
            Refused: there is no such program.
            Unavailable: it took too long, and was killed with all that it had started.
        """
        fields = {**self._fields, "machine": machine}
        arguments = [_filled(word, fields) for word in words]
        given = {f"DMSC_{name.upper()}": value for name, value in fields.items()}
        try:
            transport, command = await asyncio.get_running_loop().subprocess_exec(
                _RunningCommand,
                *arguments,
                env={**os.environ, **self._secrets, **given},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Refused(f"{what}: {arguments[0]}: {error.strerror}") from None
        try:
            async with asyncio.timeout(self._commands.timeout_s):
                await command.ended.wait()
        except TimeoutError:
            raise Unavailable(f"{what} took longer than {self._commands.timeout_s:g} s") from None
        finally:
            if not command.ended.is_set():  # what one that has ended leaves behind is its own affair
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(transport.get_pid(), signal.SIGKILL)
                await command.ended.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rest_s):
                await command.closed.wait()
        code, out, complaint = transport.get_returncode(), command.text(1), command.text(2)
        assert code is not None
        if whole and code == 0:
            return code, out
        lines = [line.strip() for line in (complaint or out).splitlines() if line.strip()]
        return code, lines[-1][:SHOWN] if lines else ""


def _filled(word: str, fields: Mapping[str, str]) -> str:
    """The word with `{machine}` and the like replaced; other braces stay."""
    for name, value in fields.items():
        word = word.replace(f"{{{name}}}", value)
    return word


class _RunningCommand(asyncio.SubprocessProtocol):
    """A command, and what it prints; beyond `MOST_BYTES` that is dropped, and nobody who writes is held up.

    `ended`: itself has. `closed`: so has whatever has inherited its output: a machine, say.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.closed = asyncio.Event()
        self._kept = {1: b"", 2: b""}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] += data[: MOST_BYTES - len(self._kept[fd])]

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport.close()
        self.closed.set()

    def text(self, fd: int) -> str:
        """What was read until now of its output (1) or its complaints (2)."""
        return self._kept[fd].decode("utf-8", errors="replace")
