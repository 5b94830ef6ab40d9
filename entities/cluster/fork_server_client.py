"""The processes of a node agent: its supervised fork server, and the children of that server.

The fork server (`workers/process/fork_server.py`) is another process; this one never imports torch. It is
restarted whenever it dies. Its children die with it, and their exits are reported like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bus.files.plain_files import APPEND, plain
from bus.logs import get_logger
from entities.cluster import fork_server_process
from entities.cluster.core import Device, Exit, ProcessObservation, ProcessWork, process_state
from entities.cluster.fork_server_process import ForkServerProcess
from entities.cluster.temporary_folder import TemporaryFolder
from schemas.errors import Unavailable

START_ATTEMPTS = 3
"""If the fork server fails this often without ever being ready, the agent ends with its last log line."""

_LAST_LINE_BYTES = 4096
_LINE_LIMIT = 1 << 20

log = get_logger("cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerReady:
    """A fork server's report when it is warm. `method` is `fork`, or `spawn` where forking is unsafe.

    `build`: torch and the processor, which a kept measurement depends on.
    """

    pid: int
    torch_version: str
    build: str
    devices: tuple[Device, ...]
    method: str
    preload_s: float
    way: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerClientTimes:
    """Limits and pauses of a fork server's client."""

    spawn_s: float = 30.0
    """A fork takes milliseconds, and a costly import before it seconds; a server that takes longer is stopped
    or starved."""
    kill_s: float = 5.0
    """Limit from SIGKILL to the report of the exit; freeing tens of gigabytes takes seconds."""
    close_s: float = 3.0
    """Limit of an orderly end; the server itself gives children 2 s."""
    restart_first_s: float = 0.1
    """First pause before a restart; each further one is twice as long."""
    restart_most_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """Isolation of the children (ADR-0034).

    `way` is `auto`, or the name of a stricter or laxer method. `users` is LO-HI, the range from which each
    child gets its own system user, where that is possible. `closed` has files and folders that no child ever
    sees, `read` folders that each may read besides its code.
    """

    way: str = "auto"
    users: str = ""
    closed: tuple[str, ...] = ()
    read: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Spawned:
    """A process that was requested from the fork server. `exit` completes when it has ended."""

    name: str
    log_path: Path
    log_start: int
    pid: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    exit: asyncio.Future[Exit] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ForkServerClient:
    """Starts, supervises and talks to one fork server. Use as `async with`; leaves nothing behind.

    Args:
        name: part of the log's file name.
        logs: folder of log files.
        code_path: folders with users' modules, appended to the instances' `sys.path`.
        on_change: called when the server became ready or was lost.
        method: how it starts children: `auto`, `fork` or `spawn`.
        at_once: start the server at once; if false, `begin` starts it, because it takes a core for seconds.
        confinement: isolation of the children; None: they may do whatever this process's user may.
        device_kinds: `module:NAME` of kinds of devices beside the built-in ones.
        times: limits and pauses.
    """

    def __init__(
        self,
        *,
        name: str,
        logs: Path,
        code_path: Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
        method: str = "auto",
        at_once: bool = True,
        confinement: Confinement | None = None,
        device_kinds: Sequence[str] = (),
        times: ForkServerClientTimes = ForkServerClientTimes(),
    ) -> None:
        self._times = times
        self._confinement = confinement
        self._device_kinds = tuple(device_kinds)
        self._order_count = 0
        self._name = name
        self._logs = logs.absolute()
        self._code_path = tuple(os.path.abspath(path) for path in code_path)
        self._on_change = on_change
        self._method = method
        self._children: dict[str, Spawned] = {}
        self._process: ForkServerProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._was_ready = False
        self._closing = False
        self._log_start = 0
        self._ready_event = asyncio.Event()
        self._started = asyncio.Event()
        if at_once:
            self._started.set()
        self.ready: ForkServerReady | None = None
        self.scratch: Path | None = None
        self._scratch: TemporaryFolder | None = None
        self.restarts = 0

    @property
    def log_path(self) -> Path:
        return self._logs / f"{self._name}-fork-server.log"

    @property
    def pid(self) -> int | None:
        """Process id of the fork server, while there is one."""
        return self._process.pid if self._process is not None else None

    async def __aenter__(self) -> ForkServerClient:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._supervisor = asyncio.create_task(self._supervise(), name="fork server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        assert self._supervisor is not None
        if self._writer is not None:
            self._writer.write_eof()  # the server ends its children, reports that, and ends itself
        else:
            self._supervisor.cancel()  # no server runs: nothing to wait for
        try:
            await asyncio.wait({self._supervisor}, timeout=self._times.close_s)
        finally:
            self._kill_group()
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
            if not self._supervisor.cancelled():
                self._supervisor.exception()  # `failed` or `wait_ready` has raised it already
            self._forget_process()

    def begin(self) -> None:
        """Start the server, if the constructor did not."""
        self._started.set()

    async def wait_ready(self, timeout_s: float | None = None) -> ForkServerReady:
        """Wait until the server is warm and return its report.

        Raises:
            Unavailable: it does not start, or not within `timeout_s`.
            BadInput: its log path is a link or a pipe.
        """
        assert self._supervisor is not None
        waiter = asyncio.ensure_future(self._ready_event.wait())
        try:
            await asyncio.wait(
                {waiter, self._supervisor}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiter.cancel()
        if self.ready is not None:
            return self.ready
        if self._supervisor.done():
            self._supervisor.result()  # raises what ended it
        raise Unavailable(f"{self._name}: the fork server is not ready yet; its log is {self.log_path}")

    async def failed(self) -> None:
        """Return when the client is closed; raise `Unavailable` if the server can't be started at all."""
        assert self._supervisor is not None
        await asyncio.shield(self._supervisor)

    async def spawn(
        self,
        name: str,
        module: str,
        payload: dict[str, Any],
        *,
        log_path: Path,
        title: str = "",
        threads: int | None = None,
        result: Path | None = None,
        needs: Sequence[str] = (),
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        code: Path | None = None,
        priority: int = 0,
    ) -> Spawned:
        """Run `module.main(payload, result)` in a new process; returns once it exists.

        Args:
            name: unique among the running processes of this node.
            module: import path of a module with `main(payload, result) -> int`.
            payload: JSON-serialisable argument.
            log_path: where its output goes (appended).
            title: what `ps` shows for it, instead of `name`.
            threads: torch's compute threads in it.
            result: file that it may write its answer to.
            needs: modules that are costly to import, which the server imports once, before the fork.
            read, write: files and folders that it may use besides its code, if it is confined.
            code: the folder of the job's own code, which it sees in place of the node's folders.
            priority: the system's (nice): 19 takes only the processor time that all others leave.

        Raises:
            Unavailable: the server is away, or the system starts no process.
        """
        if self._writer is None or self.ready is None:
            raise Unavailable(f"{self._name}: the fork server is restarting; try again")
        child = Spawned(name=name, log_path=log_path, log_start=file_size(log_path))
        order: dict[str, Any] = {
            "op": "spawn",
            "id": name,
            "title": title,
            "module": module,
            "payload": payload,
            "result": str(result) if result else None,
            "log": str(log_path),
            "threads": threads,
            "needs": list(needs),
            "code": str(code) if code else None,
            "priority": priority,
        }
        if self._confinement is not None:
            order |= self._confined_fields(payload, read, write)
        self._children[name] = child
        self._send(order)
        try:
            async with asyncio.timeout(self._times.spawn_s):
                await asyncio.shield(child.pid)
        except TimeoutError:
            self.kill(child, signal.SIGKILL)  # obeyed right after the order to spawn it
            text = f"{self._name}: the fork server made no process in {self._times.spawn_s:.0f} s"
            raise Unavailable(text) from None
        except asyncio.CancelledError:
            self.kill(child, signal.SIGKILL)
            raise
        return child

    def kill(self, child: Spawned, number: int) -> None:
        """Send a signal through the fork server: only it knows that the pid is still its child's."""
        if not child.exit.done() and self._writer is not None:
            self._send({"op": "kill", "id": child.name, "signal": int(number)})

    async def stop(self, child: Spawned, grace_s: float) -> Exit:
        """Send SIGTERM, and SIGKILL after `grace_s` (at once if 0); return how the process ended.

        Raises:
            Unavailable: not even SIGKILL ended it in time (its memory is large, or the fork server hangs).
        """
        if grace_s > 0:
            self.kill(child, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(child.exit), grace_s)
        self.kill(child, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(child.exit), self._times.kill_s)
        raise Unavailable(f"{self._name}: {child.name} does not end, even by SIGKILL")

    def _confined_fields(
        self, payload: dict[str, Any], read: Sequence[str], write: Sequence[str]
    ) -> dict[str, Any]:
        """The fields of a confined order. The payload goes through a file, not the fork server's memory."""
        assert self._confinement is not None
        assert self.scratch is not None
        self._order_count += 1
        path = self.scratch / f"order-{self._order_count}"
        try:
            with open(path, "x", opener=plain) as file:  # only this process's user may read it
                file.write(json.dumps(payload))
        except OSError as error:
            raise Unavailable(f"{self._name}: no order can be written: {error.strerror}") from error
        reach = {
            "read": [*self._confinement.read, *read],
            "write": list(write),
            "closed": list(self._confinement.closed),
        }
        return {"payload": str(path), "reach": reach}

    def _send(self, order: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(order).encode() + b"\n")

    async def _supervise(self) -> None:
        await self._started.wait()
        times = self._times
        failures, pause_s = 0, times.restart_first_s
        while True:
            self._log_start = file_size(self.log_path)
            try:
                was_ready = await self._run_once()
            finally:
                self._drop_server()
            if self._closing:
                return
            failures = 0 if was_ready else failures + 1
            why = last_line(self.log_path, self._log_start)
            if not self._was_ready and failures >= START_ATTEMPTS:
                raise Unavailable(f"{self._name}: the fork server does not start: {why} ({self.log_path})")
            pause_s = times.restart_first_s if was_ready else min(pause_s * 2, times.restart_most_s)
            log.warning("fork server ended", node=self._name, last_log_line=why, restart_in_s=pause_s)
            await asyncio.sleep(pause_s)
            self.restarts += 1

    async def _run_once(self) -> bool:
        """Start the server and handle its events until it ends; return whether it was ready."""
        own_end, server_end = socket.socketpair()
        with server_end, contextlib.ExitStack() as unless_started:
            unless_started.callback(own_end.close)
            try:
                self._scratch = TemporaryFolder()
                self.scratch = self._scratch.path
                with os.fdopen(plain(self.log_path, APPEND), "ab") as output:
                    self._process = await fork_server_process.start(
                        self._arguments(self.scratch), server_end.fileno(), output.fileno()
                    )
            except OSError as error:
                log.warning("no process for the fork server", node=self._name, error=error.strerror)
                return False
            unless_started.pop_all()
        own_end.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=own_end, limit=_LINE_LIMIT)
        if self._closing:
            self._writer.write_eof()
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._handle(json.loads(line))
        return self.ready is not None

    def _arguments(self, scratch: Path) -> list[str]:
        arguments = ["--agent", str(os.getpid()), "--method", self._method]
        arguments += ["--scratch", str(scratch), "--directory", os.getcwd()]
        if self._confinement is not None:
            arguments += ["--confine", self._confinement.way]
            if self._confinement.users:
                arguments += ["--users", self._confinement.users]
        arguments += [part for path in self._device_kinds for part in ("--device-kind", path)]
        return arguments + [part for path in self._code_path for part in ("--code-path", path)]

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self._was_ready = True
            self.ready = ForkServerReady(
                pid=event["pid"],
                torch_version=event["torch"],
                build=event["build"],
                devices=tuple(Device(**device) for device in event["devices"]),
                method=event["method"],
                preload_s=event["preload_s"],
                way=event.get("way", "none"),
            )
            if event["warning"]:
                log.warning("fork server: " + event["warning"], node=self._name)
            self._ready_event.set()
            self._on_change()
            return
        child = self._children.get(event["id"])
        if child is None:
            return
        if kind == "spawned" and not child.pid.done():
            child.pid.set_result(event["pid"])
        elif kind == "failed":
            self._end_child(child, Exit(), f"{self._name}: {event['text']}")
        elif kind == "exited":
            name = signal.Signals(event["signal"]).name if event["signal"] is not None else None
            self._end_child(
                child,
                Exit(code=event["code"], signal=name, last_line=last_line(child.log_path, child.log_start)),
            )

    def _end_child(self, child: Spawned, exit: Exit, error: str = "") -> None:
        self._children.pop(child.name, None)
        if not child.pid.done():
            text = error or f"{self._name}: the fork server was lost; try again"
            child.pid.set_exception(Unavailable(text))
            child.pid.exception()  # mark as retrieved: the caller may be gone
        if not child.exit.done():
            child.exit.set_result(exit)

    def _drop_server(self) -> None:
        was_ready, self.ready = self.ready is not None, None
        self._ready_event.clear()
        self._kill_group()
        self._forget_process()
        for child in list(self._children.values()):
            self._end_child(child, Exit(last_line=last_line(child.log_path, child.log_start)))
        if was_ready:
            self._on_change()

    def _kill_group(self) -> None:
        """Kill the server and its children. The group's id is still its own, as it was not waited for."""
        if self._process is not None:
            self._process.kill_group()

    def _forget_process(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = self.scratch = None


def file_size(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def last_line(path: Path, start: int = 0) -> str:
    """The last line with text of a log after byte `start`, at most 4 KiB of it; or ''."""
    return next(iter(last_lines(path, 1, start)), "")


def last_lines(path: Path, count: int, start: int = 0) -> tuple[str, ...]:
    """The last lines with text, oldest first, within the last 4 KiB of a log after byte `start`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _LAST_LINE_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(text for line in lines if (text := line.strip()))[-count:]


def work_of(pid: int) -> ProcessWork:
    """The work of a process so far; zeros if there is no such process or the system does not tell."""
    cpu_s, moved_bytes = 0.0, 0
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        cpu_s = float(times.user + times.system)
    with contextlib.suppress(psutil.Error, AttributeError):  # another user's, or not supported here
        io = psutil.Process(pid).io_counters()
        moved_bytes = int(io.read_chars + io.write_chars)
    return ProcessWork(cpu_s, moved_bytes)


def probe_process(pid: int) -> ProcessObservation:
    """A process of this node as the operating system shows it."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return process_state(process.status(), pid, times.user + times.system)
    except psutil.NoSuchProcess:
        return ProcessObservation(state="gone", note=f"process {pid} does not exist")
