"""Supervises a mesh's child processes: starts them, restarts them with backoff, and stops them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bus.files.plain_files import APPEND, plain
from dmsc.console.exit_codes import ExitCode
from dmsc.launch.layout import ChildSpec, child_arguments, command
from dmsc.launch.prefork_server import ForkedProcess, PreforkServer
from schemas.errors import BadInput, DmscError


@dataclass(frozen=True, kw_only=True)
class SupervisorTimes:
    """When children are started again, and how long they may take to stop."""

    grace_s: float = 15.0
    """From SIGTERM to SIGKILL. Longer than `ServingTimes.stop_s`, after which a child exits itself."""
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0
    healthy_s: float = 10.0
    """A child that ran this long is restarted after the first pause."""
    poll_s: float = 0.1


_hopeless_starts = 5
"""If a child dies so often in a row before the mesh is ready, `up` fails with the child's last line."""


Child = asyncio.subprocess.Process | ForkedProcess


def pause_before_restart(deaths: int, times: SupervisorTimes = SupervisorTimes()) -> float:
    """Seconds to wait before a restart after so many deaths in a row. The pause doubles up to a limit."""
    return float(min(times.first_pause_s * 2 ** max(deaths - 1, 0), times.longest_pause_s))


class Supervisor:
    """Keeps the children of one mesh running. `async with` starts them, and stops them in order at the end.

    `failed` completes with an error if a child can't be kept alive. `restarted` is called when a child that
    died runs again.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        logs: Path,
        environment: Mapping[str, str],
        secrets: Callable[[ChildSpec], Mapping[str, str]] = lambda child: {},
        say: Callable[[str], None],
        prefork_server: PreforkServer | None = None,
        times: SupervisorTimes = SupervisorTimes(),
    ) -> None:
        self._times = times
        self._children = children
        self._logs = logs
        self._environment = {**os.environ, **environment}
        self._secrets = secrets  # environment variables that only one child gets
        self._say = say
        self._prefork_server = prefork_server
        self._processes: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping = False
        self._replaced: set[str] = set()
        self.restarted: Callable[[], None] = lambda: None
        self.ready = False
        self.restarts = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of live children by name."""
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    async def until_ready(
        self, find_missing: Callable[[], Awaitable[str]], say_missing: Callable[[str], None]
    ) -> None:
        """Poll until nothing is missing, and say what is missing each time that this changes.

        Raises:
            DmscError: A child can't be kept alive.
        """
        last = ""
        while True:
            if self.failed.done():
                self.failed.result()
            missing = await find_missing()
            if not missing:
                return
            if missing != last:
                last = missing
                say_missing(missing)
            await asyncio.wait({self.failed}, timeout=self._times.poll_s)

    @property
    def children(self) -> tuple[ChildSpec, ...]:
        return tuple(self._children)

    async def replace(self, child: ChildSpec) -> None:
        """Stop a child in order; it is started again at once with its current secrets."""
        process = self._processes[child.name]
        self._replaced.add(child.name)
        _end(process, child)
        await self._reap(process)

    @property
    def commands(self) -> dict[str, tuple[str, ...]]:
        """The arguments with which each child was started."""
        return {child.name: child.arguments for child in self._children}

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            for child in self._children:
                await self._start(child)
                self._keepers[child.name] = asyncio.create_task(self._keep(child), name=child.name)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def last_words(self, name: str) -> str:
        """The last error line in a child's log, without `dmsc: `; else the last line."""
        try:
            with (self._logs / f"{name}.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        errors = [line.removeprefix("dmsc: ") for line in lines if line.startswith("dmsc: ")]
        return (errors or [line for line in lines if line.strip()] or [""])[-1]

    async def stop(self) -> None:
        """Stop all children, group by group in `stop_order`.

        Each group gets SIGTERM; children that do not end in time get SIGKILL. Stopping twice is fine.
        """
        self._stopping = True
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for order in sorted({child.stop_order for child in self._children}):
            group = [
                (self._processes[child.name], child)
                for child in self._children
                if child.stop_order == order and child.name in self._processes
            ]
            for process, child in group:
                _end(process, child)
            await asyncio.gather(*(self._reap(process) for process, _ in group))

    async def _reap(self, process: Child) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), self._times.grace_s)
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            await process.wait()

    async def _start(self, child: ChildSpec) -> None:
        environment = {**self._environment, **self._secrets(child)}
        with os.fdopen(plain(self._logs / f"{child.name}.log", APPEND), "ab") as log:
            process: Child | None = None
            # A child with a user's code is not forked: the prefork server's memory has secrets of all
            # children.
            if self._prefork_server is not None and not child.users_code:
                arguments = child_arguments(child, os.getpid())
                process = await self._prefork_server.fork(arguments, environment, log.fileno())
            if process is None:
                process = await asyncio.create_subprocess_exec(
                    *command(child, os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    process_group=0,  # so that a terminal's Ctrl-C reaches only the supervisor
                )
            self._processes[child.name] = process

    async def _start_with_retries(self, child: ChildSpec) -> None:
        while True:
            try:
                return await self._start(child)
            except (OSError, BadInput) as error:  # no space for the log, no such file, too many processes
                self._say(f"{child.name} can't be started: {error}; trying again")
                await asyncio.sleep(pause_before_restart(_hopeless_starts, self._times))

    async def _keep(self, child: ChildSpec) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            code = await self._processes[child.name].wait()
            if self._stopping:
                return
            if child.name in self._replaced:
                self._replaced.discard(child.name)
                self._say(f"{child.name} is started again, with a new credential")
                await self._start_with_retries(child)
                continue
            if code == 0 and child.may_leave:
                self._say(f"{child.name} has left, as it was told to")
                return
            deaths = 1 if time.monotonic() - began > self._times.healthy_s else deaths + 1
            words = self.last_words(child.name)
            if not self.ready and (code == ExitCode.BAD_INPUT or deaths >= _hopeless_starts):
                kind = BadInput if code == ExitCode.BAD_INPUT else DmscError
                if not self.failed.done():
                    self.failed.set_exception(
                        kind(f"{child.name}: {words} (log: {self._logs / child.name}.log)")
                    )
                return
            pause_s = pause_before_restart(deaths, self._times)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            why = how if code == -signal.SIGKILL else f"{how}: {words}"  # SIGKILL leaves no last line
            what = "has left at a signal" if code == ExitCode.TERMINATED else f"died ({why})"
            self._say(f"{child.name} {what}; starting it again in {pause_s:.1f} s")
            await asyncio.sleep(pause_s)
            self.restarts += 1
            await self._start_with_retries(child)
            try:
                self.restarted()
            except OSError as error:
                self._say(f"who runs is not written down: {error}")


def _end(process: Child, child: ChildSpec) -> None:
    """Tell a child to end now."""
    if child.takes_notice:  # SIGTERM alone would leave it time, and SIGINT alone may still be ignored
        _signal(process, signal.SIGINT)
    _signal(process, signal.SIGTERM)


def _signal(process: Child, number: signal.Signals) -> None:
    if process.returncode is not None:
        return
    try:
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)  # with all processes that it started
        else:
            process.send_signal(number)
    except ProcessLookupError:
        pass
