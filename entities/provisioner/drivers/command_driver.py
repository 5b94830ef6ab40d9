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
    """

    def __init__(
        self, commands: PoolCommands, fields: Mapping[str, str], secrets: Mapping[str, str] | None = None
    ) -> None:
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
            process = await asyncio.create_subprocess_exec(
                *arguments,
                env={**os.environ, **self._secrets, **given},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Refused(f"{what}: {arguments[0]}: {error.strerror}") from None
        code = None
        try:
            async with asyncio.timeout(self._commands.timeout_s):
                out, complaint = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                code = await process.wait()
        except TimeoutError:
            raise Unavailable(f"{what} took longer than {self._commands.timeout_s:g} s") from None
        finally:
            if code is None:  # what one that has ended leaves behind is its own affair: a machine, say
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if whole and code == 0:
            return code, out
        lines = [line.strip() for line in (complaint or out).splitlines() if line.strip()]
        return code, lines[-1][:SHOWN] if lines else ""


def _filled(word: str, fields: Mapping[str, str]) -> str:
    """The word with `{machine}` and the like replaced; other braces stay."""
    for name, value in fields.items():
        word = word.replace(f"{{{name}}}", value)
    return word


async def _read(stream: asyncio.StreamReader | None) -> str:
    """What the stream gives, to its end; beyond `MOST_BYTES` it is dropped."""
    assert stream is not None
    kept = b""
    while chunk := await stream.read(1 << 16):
        kept += chunk[: MOST_BYTES - len(kept)]
    return kept.decode("utf-8", errors="replace")
