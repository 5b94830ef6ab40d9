"""Fork server of a node agent: imports torch once, then forks instances in milliseconds (DESIGN §6).

Cold start is mostly `import torch`. This process pays for it once and then only forks: it stays
single-threaded, runs no event loop, and never initialises a device, because a child inherits all three
broken. It is started by the node agent as `python -m workers.process.fork_server --fd N`, or forked for it
from an incubator (`workers/process/incubator.py`), and speaks JSON lines over that inherited socket:

    agent  → {"op": "spawn", "id", "title", "module", "payload", "result", "log", "threads", "needs", "reach",
              "code", "priority"}
             {"op": "kill", "id", "signal"}
    server → {"event": "ready", "pid", "torch", "build", "devices", "threads", "method", "warning", "way"}
             {"event": "spawned", "id", "pid"}
             {"event": "failed", "id", "text"}                       no process could be made
             {"event": "exited", "id", "pid", "code", "signal"}      one of the two is null

A child runs `module.main(payload, result)` and exits with the number it returns. A `payload` that is a
path is a file with it, for the child alone to read and remove: what this process knew, every later child
would have in its memory. With `reach` the child is confined (`workers/sandbox`, ADR-0034) before it imports
the module; if that fails, it ends. `code` is the folder of the job's own code, which takes the place of the
node's (ADR-0051). When the agent goes
away (end of file on the socket, or SIGTERM) children get SIGTERM, after 2 s SIGKILL, and the server ends;
when the server itself is killed, the kernel kills the children (Linux) or they notice within a second.

Where `fork` is unsafe (macOS; threads exist after the imports) children are started afresh instead:
the same behaviour at the price of the import. The `ready` event says so in `warning`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bus.files.removal import remove_folder
from bus.parent_death import end_with_parent
from workers.process import prefork
from workers.process.child_process import run_child
from workers.sandbox import confinement, users
from workers.sandbox.confinement import ConfinementMethod

PRELOAD = (
    "setproctitle",  # before a child replaces its environment
    "torch",
    "torch.distributed",
    "safetensors.torch",
    "pydantic",
    "structlog",
    "psutil",
    "fsspec",
    "bus.connection",
    "bus.security.credentials",
    "bus.mesh.registration",
    "bus.files.artifacts",
    "numpy.random",
    "workers.instance",
    "workers.tasks.analysis",
    "workers.tasks.sample",
    "workers.tasks.files",
    "workers.tasks.code",
    "workers.tasks.standard_stage",
)
"""Imported before the first fork; only torch is indispensable. None of them may start a thread."""

PRELOAD_IN_QUIET = (
    "workers.state.checkpoint_files",  # DCP brings sympy
    "torch._dynamo",  # arithmetic on meta tensors imports it, in each process of a recorded model
)
"""What only some jobs need takes as long as torch itself: imported once no order has come for `quiet_s`, or
when an order `needs` it."""

_BLOCKED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_LINUX = sys.platform == "linux"


@dataclass(frozen=True, kw_only=True)
class ForkServerPauses:
    """How long the fork server waits."""

    terminate_grace_s: float = 2.0
    """How long children may take to end by themselves once the agent is gone."""
    quiet_s: float = 3.0
    """Without an order for this long, `PRELOAD_IN_QUIET` is imported."""


class ForkServer:
    """The server's whole state: its channel to the agent and the children that it has not reaped yet."""

    def __init__(
        self,
        channel: socket.socket,
        *,
        method: str,
        scratch: Path | None = None,
        way: ConfinementMethod = ConfinementMethod.NONE,
        instance_users: tuple[int, int] = users.DEFAULT_RANGE,
        times: ForkServerPauses = ForkServerPauses(),
    ) -> None:
        self._channel = channel
        self._times = times
        self._way = way
        self._users = instance_users
        self._leases: dict[str, users.Lease] = {}
        self._method = method
        self._in_quiet = PRELOAD_IN_QUIET if method == "fork" else ()
        self._scratch = scratch
        self._children: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup_read, self._wakeup_write = os.pipe()
        self._ending = False

    def serve(self, ready: dict[str, Any]) -> None:
        """Announce `ready`, obey orders and report exits until the agent goes away."""
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only the wakeup matters
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the agent's to handle
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ)
        self._say(ready)
        buffer = b""
        while not self._ending:
            quiet_s = self._times.quiet_s if self._in_quiet and not self._children else None
            ready_files = self._selector.select(quiet_s)
            if not ready_files:
                _import_missing(self._in_quiet)
                self._in_quiet = ()
            for key, _ in ready_files:
                if key.fileobj is self._channel:
                    received = _receive(self._channel)
                    self._ending = self._ending or not received
                    *lines, buffer = (buffer + received).split(b"\n")
                    for line in lines:
                        self._obey(line)
                else:
                    _drain(self._wakeup_read)
            self._reap()
        self._end_children()
        if self._scratch is not None:
            remove_folder(self._scratch)

    def _end(self, *_: object) -> None:
        self._ending = True

    def _say(self, event: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(event).encode() + b"\n")
        except OSError:  # the agent is gone
            self._ending = True

    def _obey(self, line: bytes) -> None:
        try:
            order = json.loads(line)
            op, name = order["op"], order["id"]
        except (ValueError, KeyError, TypeError) as error:
            _warn(f"unusable order of {len(line)} bytes: {type(error).__name__}: {error}")
            return
        if op == "spawn":
            self._spawn(order)
        elif op == "kill":
            pid = self._children.get(name)
            if pid is not None:  # not reaped yet, so that the pid cannot be another process's
                os.kill(pid, order["signal"])
        else:
            _warn(f"unknown order {op!r} for {name}")

    def _spawn(self, order: dict[str, Any]) -> None:
        name = order["id"]
        if name in self._children:
            self._say({"event": "failed", "id": name, "text": f"{name} runs already"})
            return
        try:
            if order.get("reach") is not None:
                self._prepare(order)
            if self._method == "fork":
                _import_missing(order.get("needs") or ())
                pid = self._fork(order)
            else:
                pid = _start_afresh(order)
        except OSError as error:
            self._tidy(name)
            self._say({"event": "failed", "id": name, "text": f"no new process: {error.strerror}"})
            return
        self._children[name] = pid
        self._say({"event": "spawned", "id": name, "pid": pid})

    def _prepare(self, order: dict[str, Any]) -> None:
        """Who the child will be, and where its temporary files go."""
        order["way"] = self._way
        if self._way is ConfinementMethod.OWN_USER:
            lease = self._leases[order["id"]] = users.lease(self._users)
            order["user"] = lease.user
        if self._scratch is not None:
            order["reach"]["scratch"] = str(self._scratch / order["id"])

    def _tidy(self, name: str) -> None:
        """After a child's end: its user is free, its temporary files go."""
        lease = self._leases.pop(name, None)
        if lease is not None:
            lease.end()
        if self._scratch is not None and self._way is not ConfinementMethod.NONE:
            remove_folder(self._scratch / name)

    def _fork(self, order: dict[str, Any]) -> int:
        parent = os.getpid()
        # A signal between fork and the child's reset would run the server's handler in the child: hold it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            return prefork.fork(lambda: self._child(parent, order), order.get("module"))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

    def _child(self, parent: int, order: dict[str, Any]) -> int:
        end_with_parent(parent, signal.SIGKILL)
        self._forget_server()
        return run_child(order)

    def _forget_server(self) -> None:
        """In the child: no descriptor and no signal handler of the server survives."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self._channel.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        gc.enable()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)

    def _reap(self) -> None:
        for name, pid in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                continue
            del self._children[name]
            self._tidy(name)
            code = os.waitstatus_to_exitcode(status)
            self._say(
                {
                    "event": "exited",
                    "id": name,
                    "pid": pid,
                    "code": code if code >= 0 else None,
                    "signal": -code if code < 0 else None,
                }
            )

    def _end_children(self) -> None:
        self._signal_children(signal.SIGTERM)
        self._signal_children(signal.SIGCONT)  # a stopped child could not take the SIGTERM
        deadline = time.monotonic() + self._times.terminate_grace_s
        while self._children and (left := deadline - time.monotonic()) > 0:
            self._selector.select(min(left, 0.1))
            _drain(self._wakeup_read)
            self._reap()
        self._signal_children(signal.SIGKILL)
        for pid in self._children.values():
            os.waitpid(pid, 0)

    def _signal_children(self, number: int) -> None:
        for pid in self._children.values():
            os.kill(pid, number)


def _start_afresh(order: dict[str, Any]) -> int:
    """Start a child without fork; it imports torch by itself. The order never shows in `ps`."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from workers.process.child_process import run_afresh; run_afresh({os.getpid()})"
    )
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(order).encode())
        stdin.flush()
        stdin.seek(0)
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", program],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, stdin.fileno(), 0)],
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGCHLD],
        )


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(1 << 20)
    except ConnectionError:
        return b""


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


def _warn(text: str) -> None:
    print(f"fork server: {text}", file=sys.stderr, flush=True)


def preload(names: Sequence[str] = PRELOAD) -> None:
    """Import what instances need. Only a missing torch is fatal: another failure shows in the child."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if name == "torch":
                raise
            _warn(f"{name} not preloaded: {type(error).__name__}: {error}")


def _import_missing(names: Sequence[str]) -> None:
    """Imports what is not there yet, for all children from here on."""
    if all(name in sys.modules for name in names):
        return
    preload(names)
    prefork.freeze()


def warm_up() -> None:
    """What each child would do for itself otherwise: OpenSSL takes 20 ms to find its first digest.

    The kernel of sums no child may build, since a child may be any tenant's.
    """
    hashlib.sha256()
    try:
        without = importlib.import_module("workers.fixed_point.kernel").build()
    except Exception as error:  # as in `preload`
        without = f"{type(error).__name__}: {error}"
    if without:
        _warn(f"exact sums take three times as long without their kernel: {without}")


def probe_devices(timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """Devices beside the processor, asked for in a child that may initialise drivers and then ends.

    Returns `[{"device": "cuda:0", "name": …, "memory_bytes": …}]`, empty where torch sees none.
    """
    from workers.devices.device_kind import KINDS

    kinds = [kind for kind in KINDS.values() if kind.name != "cpu" and kind.is_built_in()]
    if not _LINUX or not kinds:
        return []
    reader, writer = os.pipe()

    def look() -> int:
        found = [asdict(device) for kind in kinds for device in kind.find()]
        os.write(writer, json.dumps(found).encode())
        return 0

    pid = prefork.fork(look, "the look for devices")
    os.close(writer)
    with selectors.DefaultSelector() as selector, open(reader, "rb") as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        answer = pipe.read() if selector.select(timeout_s) else b""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not answer:
        _warn(f"no answer of {' and '.join(kind.name for kind in kinds)}: only the processor is offered")
        return []
    return list(json.loads(answer))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the fork server; the node agent calls it."""
    parser = argparse.ArgumentParser(prog="python -m workers.process.fork_server")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the node agent")
    parser.add_argument(
        "--agent", type=int, help="the node agent's pid, for whoever looks at the process table"
    )
    parser.add_argument("--scratch", type=Path, help="folder to remove at the end")
    parser.add_argument("--directory", type=Path, help="working directory of the instances")
    parser.add_argument("--code-path", action="append", default=[], help="users' modules; repeatable")
    parser.add_argument(
        "--confine",
        choices=["auto", *ConfinementMethod],
        default=ConfinementMethod.NONE,
        help="children with a reach",
    )
    parser.add_argument("--device-kind", action="append", default=[], help="module:NAME; repeatable")
    parser.add_argument("--users", type=users.parse_range, default=users.DEFAULT_RANGE, metavar="LO-HI")
    parser.add_argument("--method", choices=["auto", "fork", "spawn"], default="auto")
    options = parser.parse_args(arguments)
    if options.scratch is not None:  # so that an instance killed while it writes leaves nothing behind
        os.environ["TMPDIR"] = str(options.scratch)
        tempfile.tempdir = None

    channel = socket.socket(fileno=options.fd)
    channel.set_inheritable(False)
    # Behind everything else: a user's `schemas` or `bus` folder must not take the place of ours.
    if sys.path[0] in sys.path[1:]:  # `-m` put our own folder first: only a checkout needs it there
        del sys.path[0]
    sys.path.extend(path for path in options.code_path if path not in sys.path)
    named = [*filter(None, os.environ.get(confinement.CODE_PATH, "").split(os.pathsep)), *options.code_path]
    os.environ[confinement.CODE_PATH] = os.pathsep.join(dict.fromkeys(named))
    if options.directory is not None:
        os.chdir(options.directory)
    started = time.monotonic()
    preload()
    warm_up()
    import torch

    from workers.devices.device_kind import processor_name, register_kind

    threads = prefork.thread_count()
    method, warning = _choose_method(options.method, threads)
    if warning:
        _warn(f"WARNING: {warning}")
    for path in options.device_kind:
        register_kind(path)
    devices = probe_devices()
    way = confinement.best_method() if options.confine == "auto" else ConfinementMethod(options.confine)
    prefork.freeze()
    gc.disable()
    ready = {
        "event": "ready",
        "pid": os.getpid(),
        "torch": torch.__version__,
        "build": f"torch {torch.__version__} on {processor_name()}",
        "devices": devices,
        "threads": threads,
        "method": method,
        "warning": warning,
        "way": way,
        "preload_s": round(time.monotonic() - started, 3),
    }
    server = ForkServer(
        channel, method=method, scratch=options.scratch, way=way, instance_users=options.users
    )
    server.serve(ready)


def _choose_method(requested: str, threads: int) -> tuple[str, str]:
    """`fork` or `spawn`, and the warning that belongs to the choice (empty if none)."""
    if requested == "spawn" or (requested == "auto" and not _LINUX):
        return "spawn", ""
    if threads == 1:
        return "fork", ""
    danger = f"{threads} threads exist after the imports, and a child would wait forever for locks they hold"
    if requested == "fork":
        return "fork", f"forking although {danger}"
    return "spawn", f"{danger}: instances start without fork and import torch each by itself"


if __name__ == "__main__":
    main()
