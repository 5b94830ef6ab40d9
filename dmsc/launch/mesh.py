"""One mesh on this machine: starts the server and the processes, waits until it is ready, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from bus.files.plain_files import APPEND, plain
from bus.security import renewal
from bus.server.embedded import LOOPBACK
from bus.server.embedded_cluster import EmbeddedCluster, copies
from bus.tasks import background
from dmsc.client.async_client import AsyncClient
from dmsc.launch import layout, ports
from dmsc.launch.incubation import incubating
from dmsc.launch.layout import ChildSpec
from dmsc.launch.log_rotation import rotating
from dmsc.launch.mesh_options import MeshOptions
from dmsc.launch.prefork_server import PreforkServer, reap_orphan
from dmsc.launch.rotation import HandingOver
from dmsc.launch.supervisor import Supervisor
from dmsc.launch.tenancy import HostsBus, hosts_bus, not_one_mesh
from dmsc.process.composition import own_address
from dmsc.process.sandboxing import sentence, way_here
from dmsc.state.state_folder import MeshFile, StateFolder
from schemas.errors import BadInput, DmscError, Unavailable
from schemas.gateway_api import MeshStatus
from schemas.registry import InstanceState
from workers.sandbox.confinement import ConfinementMethod

NATS_PORT, HTTP_PORT = 4222, 8080

Say = Callable[[str], None]


def quiet(text: str) -> None:
    """A `Say` that says nothing."""


@dataclass(frozen=True, kw_only=True)
class RunningMesh:
    """A mesh that is ready, or a host whose tenants are ready."""

    folder: StateFolder
    file: MeshFile
    supervisor: Supervisor

    async def failed(self) -> None:
        """Wait until a process can't be kept alive, and raise its error."""
        await asyncio.shield(self.supervisor.failed)


@asynccontextmanager
async def running_mesh(
    options: MeshOptions, say: Say, progress: Say = quiet, prefork_server: PreforkServer | None = None
) -> AsyncIterator[RunningMesh]:
    """Start a mesh, wait until it is ready, and stop it when the block ends.

    Args:
        options: What to start.
        say: Gets lines that a person should keep, such as taken ports and children that died.
        progress: Gets what the mesh still waits for, each time that this changes.
        prefork_server: It forks the children; None: each child is started as a new process.

    Raises:
        BadInput: The state folder is in use, a requested port is taken, or an option is wrong.
        Unavailable: The mesh did not become ready; the text says what is missing.
    """
    way = way_here(trusted=options.trust_researchers)
    options = replace(options, researchers=options.trust_researchers or way is not ConfinementMethod.NONE)
    folder = StateFolder(options.state)
    if folder.tenants():
        raise not_one_mesh(folder)
    with folder.hold():
        folder.write_tokens()
        renewal.follow(folder.bus_token(), folder.path / "bus_token")  # for this process's connections
        folder.logs.mkdir(exist_ok=True)
        if any(url.startswith("tls://") for url in folder.host_servers()):
            options = replace(options, tls=True)
        if options.tls:
            certify(options, folder)
        started_at = time.time()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(rotating(folder.logs))
            bus = await stack.enter_async_context(_bus(options, folder, say))
            inner = [local(url) for url in bus.urls]
            await stack.enter_async_context(_brokered(folder, inner))
            handover = HandingOver(folder)
            incubator = stack.enter_context(incubating(folder.logs / "incubator.log"))
            supervisor, file = await stack.enter_async_context(
                _started(
                    options, folder, inner, incubator, handover, say, progress, started_at, prefork_server
                )
            )
            file = replace(
                file,
                ready_at=time.time(),
                clusters=dict.fromkeys(options.clusters, options.slots),
                sandbox=sentence(way, trusted=options.trust_researchers, code=options.code),
            )
            running = await stack.enter_async_context(tended(folder, file, bus, supervisor, prefork_server))
            await stack.enter_async_context(background(handover.follow(supervisor, say), name="rotation"))
            yield running


@asynccontextmanager
async def tended(
    folder: StateFolder,
    file: MeshFile,
    bus: EmbeddedCluster | HostsBus,
    supervisor: Supervisor,
    prefork_server: PreforkServer | None,
) -> AsyncIterator[RunningMesh]:
    """Keep the mesh file current for the block: it lists the running processes, also after restarts."""
    file = replace(file, children=_pids(bus, supervisor), commands=supervisor.commands)
    folder.write_mesh(file)
    supervisor.ready = True
    bus.restarted = supervisor.restarted = lambda: folder.write_mesh(
        replace(file, children=_pids(bus, supervisor))
    )
    async with _reaping(prefork_server, lambda: _pids(bus, supervisor)):
        yield RunningMesh(folder=folder, file=file, supervisor=supervisor)


@asynccontextmanager
async def _reaping(
    prefork_server: PreforkServer | None, pids: Callable[[], dict[str, int]], *, every_s: float = 1.0
) -> AsyncIterator[None]:
    """Reap orphaned processes for the block.

    With a prefork server, this process becomes the parent of processes whose parent has died, and must wait
    for them when they end.
    """
    if prefork_server is None:
        yield
        return

    async def reap() -> None:
        candidate: int | None = None
        while True:
            candidate = reap_orphan({prefork_server.pid, *pids().values()}, candidate)
            await asyncio.sleep(every_s)

    async with background(reap()):
        yield


def certify(options: MeshOptions, folder: StateFolder, by: StateFolder | None = None) -> None:
    """Make a certificate for this machine's names if needed, and trust its CA in this process.

    A CA is made if the folder has none. With `by`, that folder's CA signs the certificate instead.
    """
    from bus.nats import tls_trust
    from dmsc.state.certificates import CertificateFiles, make_certificates, still_good

    hosts = ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    if options.bind not in ("0.0.0.0", "::", *hosts):
        hosts.append(options.bind)
    if options.bind in ("0.0.0.0", "::"):
        hosts.append(own_address(options.bind))
    hosts = list(dict.fromkeys(hosts))
    files = CertificateFiles(folder.tls.ca.parent)
    if not still_good(files, hosts):
        authority = None if by is None else CertificateFiles(by.tls.ca.parent)
        make_certificates(files.folder, hosts, by=authority)
    tls_trust.believe(files.ca)


def _pids(bus: EmbeddedCluster | HostsBus, supervisor: Supervisor) -> dict[str, int]:
    """The ids of live processes by name."""
    servers = {
        "bus" if len(bus.servers) == 1 else f"bus-{number}": server.pid
        for number, server in enumerate(bus.servers, start=1)
        if server.running
    }
    return {**servers, **supervisor.pids}


@asynccontextmanager
async def _bus(
    options: MeshOptions, folder: StateFolder, say: Say
) -> AsyncIterator[EmbeddedCluster | HostsBus]:
    """The bus of this mesh: its own servers with an auth callout in this process, or the host's servers."""
    if folder.host_servers():
        yield await hosts_bus(folder)
        return
    server = own_servers(options, folder, say, token=folder.bus_token(), guard=folder.guard_keys())
    async with server as bus, _guarded(folder, [local(url) for url in bus.urls]):
        yield bus


@asynccontextmanager
async def own_servers(
    options: MeshOptions, folder: StateFolder, say: Say, **how: Any
) -> AsyncIterator[EmbeddedCluster]:
    """Run the mesh's own NATS servers; a server that dies is started again on the same port and store.

    `how` has further arguments of `EmbeddedServer`.
    """
    port = options.nats_port
    if port is None and not ports.is_free(options.bind, NATS_PORT):
        say(f"port {NATS_PORT} is taken, using a free one for the bus")
        port = 0
    elif port:
        ports.choose(options.bind, port, NATS_PORT, 1, "--nats-port")  # raises a clear error if it is taken
    if monitor := ports.port_or_off(options.monitor_port, "--monitor-port"):
        ports.choose(LOOPBACK, monitor, 0, 1, "--monitor-port")
    port = NATS_PORT if port is None else port or -1  # -1: the server takes a free one itself
    bus = EmbeddedCluster(
        folder.store,
        size=options.servers,
        port=port,
        host=options.bind,
        tls=folder.tls if options.tls else None,
        monitor=monitor,
        **how,
    )
    async with bus:
        if url := bus.servers[0].monitor_url:
            say(f"NATS's monitoring pages, for whoever is on this machine: {url}")
        async with background(bus.keep(say)):
            yield bus


@asynccontextmanager
async def _guarded(folder: StateFolder, urls: list[str]) -> AsyncIterator[None]:
    """Run a second auth callout in this process for the block.

    Nobody can connect to the bus without one. If the control plane's authorizer were the only one and died,
    its restarted process could not connect.
    """
    if folder.guard_keys() is None:
        yield
        return
    from entities.authorizer import AuthorizerConfig, guarding

    config = AuthorizerConfig(
        tokens_file=folder.tokens_file,
        user_key=folder.path / layout.USER_KEY,
        keys_file=folder.guard_file,
        servers=tuple(urls),
        bus_token=folder.bus_token(),
        ends_old_roots=True,
        sid="supervisor",
    )
    with guard_log(folder) as log:
        async with guarding(config, log):
            yield


@contextlib.contextmanager
def guard_log(folder: StateFolder) -> Iterator[Callable[..., None]]:
    """The function with which an auth callout in this process writes its log."""
    with os.fdopen(plain(folder.logs / "guard.log", APPEND), "a", encoding="utf-8") as record:

        def log(event: str, **fields: str) -> None:
            with contextlib.suppress(OSError):  # a full disk must not prevent connections
                record.write(json.dumps({"timestamp": time.time(), "event": event, **fields}) + "\n")
                record.flush()

        yield log


@asynccontextmanager
async def _brokered(folder: StateFolder, urls: list[str]) -> AsyncIterator[None]:
    """Run a second broker in this process for the block.

    Reads then work even while the control plane, with its own broker, is away.
    """
    if folder.guard_keys() is None and not folder.host_servers():
        yield
        return
    from entities.broker import brokering

    async with brokering(urls, folder.bus_token(), "broker-supervisor"):
        yield


@asynccontextmanager
async def _started(
    options: MeshOptions,
    folder: StateFolder,
    bus_urls: list[str],
    incubator: dict[str, str],
    handover: HandingOver,
    say: Say,
    progress: Say,
    started_at: float,
    prefork_server: PreforkServer | None,
) -> AsyncIterator[tuple[Supervisor, MeshFile]]:
    """Start the children and wait until they are ready.

    Yields the supervisor and what the mesh file says of their addresses. If a port that was chosen here is
    taken meanwhile, another port is tried.
    """
    # A port that was free may be taken by the time a gateway listens; then any other port is tried.
    others = [] if options.http_port else [replace(options, http_port=0) for _ in range(2)]
    attempts = [options, *others]
    for attempt in attempts:
        http_ports, remark = ports.choose(
            options.bind, attempt.http_port, HTTP_PORT, len(options.clusters), "--http-port"
        )
        say_if(say, remark)
        host = own_address(options.bind) if options.bind in ("0.0.0.0", "::") else options.bind
        protocol = "https" if options.tls else "http"
        gateways = {
            c: f"{protocol}://{host}:{port}" for c, port in zip(options.clusters, http_ports, strict=True)
        }
        file = MeshFile(
            servers=tuple(outer(url, options) for url in bus_urls),
            gateways=gateways,
            pid=os.getpid(),
            started_at=started_at,
        )
        folder.write_mesh(file)
        together = ",".join(bus_urls)
        keys = None if folder.guard_keys() is None else folder.guard_file
        children = layout.lay_out(options, together, http_ports, folder.tokens_file, folder.logs, keys)
        children, metrics = _metered(options, children)
        environment = {
            "DMSC_BUS": together,
            "DMSC_STATE": str(folder.path),
            "DMSC_REPLICAS": str(copies(len(bus_urls))),
            **incubator,
        }
        if options.tls:
            tls = folder.tls
            environment |= {"DMSC_TLS_CERT": str(tls.certificate), "DMSC_TLS_KEY": str(tls.key)}

        async with Supervisor(
            children,
            logs=folder.logs,
            environment=environment,
            secrets=handover.secrets_of,
            say=say,
            prefork_server=prefork_server,
        ) as supervisor:
            try:
                await _until_ready(options, supervisor, list(gateways.values()), folder.token(), progress)
            except BadInput as error:
                if attempt is attempts[-1] or all(ports.is_free(options.bind, port) for port in http_ports):
                    raise
                say(f"{error.text}; trying other ports")
                continue
            yield supervisor, replace(file, metrics=metrics)
            return


def _metered(options: MeshOptions, children: list[ChildSpec]) -> tuple[list[ChildSpec], dict[str, str]]:
    """The children with ports for their metrics, and the metrics URLs by process.

    The ports stay the same over restarts. If another program takes one meanwhile, the process serves its
    metrics at another port, which `dmsc status` shows.
    """
    first = ports.port_or_off(options.metrics_port, "--metrics-port")
    if first is None:
        return layout.with_metrics(children, (), options.metrics_bind), {}
    names = [child.name for child in children if child.arguments[0] in ("run", "join")]
    numbers, _ = ports.choose(options.metrics_bind, first, 0, len(names), "--metrics-port")
    host = own_address(options.metrics_bind)
    urls = {name: f"http://{host}:{port}/metrics" for name, port in zip(names, numbers, strict=True)}
    return layout.with_metrics(children, numbers, options.metrics_bind), urls


async def _until_ready(
    options: MeshOptions,
    supervisor: Supervisor,
    urls: list[str],
    token: str | None,
    progress: Say,
    *,
    limit_s: float = 60.0,
) -> None:
    """Wait until every service is active and every cluster has a node, according to the gateways."""
    expected = layout.expected_services(options)
    missing = ""

    def say_missing(text: str) -> None:
        progress("waiting for the gateways" if text.startswith("no gateway") else text)

    async with AsyncClient(urls, token=token, timeout_s=2.0) as client:

        async def find_missing() -> str:
            nonlocal missing
            try:
                missing = lacking(await client.mesh(), expected, options.clusters)
            except DmscError as error:
                missing = error.text
            return missing

        try:
            async with asyncio.timeout(limit_s):
                await supervisor.until_ready(find_missing, say_missing)
        except TimeoutError:
            raise Unavailable(f"the mesh is not ready after {limit_s:.0f} s: {missing}") from None


def lacking(status: MeshStatus, expected: frozenset[str], clusters: tuple[str, ...]) -> str:
    """Describe what a mesh still lacks; empty if it is ready."""
    active = {service.sid for service in status.services if service.state is InstanceState.ACTIVE}
    absent = sorted(expected - active)
    if absent:
        return f"not registered: {', '.join(absent)}"
    empty = sorted(set(clusters) - {node.cluster for node in status.nodes})
    return f"no node in cluster {', '.join(empty)}" if empty else ""


def say_if(say: Say, text: str) -> None:
    """Say a text unless it is empty."""
    if text:
        say(text)


def local(url: str) -> str:
    """A server's address for processes of this machine."""
    return url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


def outer(url: str, options: MeshOptions) -> str:
    """A server's address for other machines, if it listens for them; else the address itself."""
    if options.bind not in ("0.0.0.0", "::"):
        return url
    return url.replace("127.0.0.1", own_address(options.bind))


async def stop_mesh(folder: StateFolder, limit_s: float, *, poll_s: float = 0.1) -> int | None:
    """Stop the mesh that runs on this folder; return its process id, or None if no mesh runs.

    Raises:
        DmscError: The process still runs after `limit_s` seconds.
    """
    pid = folder.owner()
    if pid is None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while folder.owner() == pid:
        if time.monotonic() > deadline:
            raise DmscError(
                f"pid {pid} has not stopped within {limit_s:.0f} s; see {folder.logs}, or kill -9 {pid}"
            )
        await asyncio.sleep(poll_s)
    return pid
