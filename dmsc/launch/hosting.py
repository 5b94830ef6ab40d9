"""Several meshes on one server, each a tenant in its own account: `dmsc up --tenant NAME …` (ADR-0028).

The host consists of the server, its auth callout in this process, and one `dmsc up` per tenant. Each tenant
has its own state folder below the host's.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bus.guard.accounts import AccountLimits, NatsAccount, account_of, least_store_bytes
from bus.security import renewal
from bus.server.embedded_cluster import copies
from dmsc.console.command_app import option_words
from dmsc.launch import layout, ports
from dmsc.launch.layout import ChildSpec
from dmsc.launch.log_rotation import rotating
from dmsc.launch.mesh import (
    HTTP_PORT,
    RunningMesh,
    Say,
    certify,
    guard_log,
    local,
    outer,
    own_servers,
    quiet,
    say_if,
    tended,
)
from dmsc.launch.mesh_options import MeshOptions
from dmsc.launch.prefork_server import PreforkServer
from dmsc.launch.supervisor import Supervisor, SupervisorTimes
from dmsc.process.sandboxing import sentence, way_here
from dmsc.state.state_folder import MeshFile, StateFolder
from schemas.base import is_token
from schemas.errors import BadInput

STORE_BYTES, MEMORY_BYTES, CONNECTIONS = 64 << 30, 1 << 30, 1 << 16
"""The limits of the server. Tenants share them equally; a quota replaces the share of the store."""
GIB = 1 << 30
TENANT_TIMES = SupervisorTimes(grace_s=35.0)
"""A tenant's mesh stops in order within its grace; its own processes have less."""


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options of `dmsc up --tenant …`.

    `mesh` applies to each tenant, except for its state folder, which is the host's.
    """

    tenants: tuple[str, ...]
    mesh: MeshOptions
    quota_bytes: int | None = None  # on disk, per tenant and replica; None: an equal share

    def __post_init__(self) -> None:
        """
        Raises:
            BadInput: A name is not allowed or occurs twice, or a quota is less than a mesh's streams reserve.
        """
        for name in self.tenants:
            if not is_token(name):
                raise BadInput(f"--tenant {name!r}: use letters, digits, - and _ only")
        if len(set(self.tenants)) != len(self.tenants):
            raise BadInput("--tenant: the same name twice")
        if self.limits.store_bytes < least_store_bytes():
            least = least_store_bytes() / GIB
            raise BadInput(
                f"{self.limits.store_bytes / GIB:.2f} GiB per tenant: a mesh's streams alone"
                f" reserve {least:.2f}; give more by --quota"
            )

    @property
    def limits(self) -> AccountLimits:
        """The limits of each tenant's account."""
        share = len(self.tenants)
        return AccountLimits(
            store_bytes=self.quota_bytes or STORE_BYTES // share,
            memory_bytes=MEMORY_BYTES // share,
            connections=CONNECTIONS // share,
        )


@asynccontextmanager
async def running_host(
    options: HostOptions, say: Say, progress: Say = quiet, prefork_server: PreforkServer | None = None
) -> AsyncIterator[RunningMesh]:
    """Start the server, its auth callout and the tenants' meshes, and stop them when the block ends.

    Raises:
        BadInput: The state folder is in use or is that of one mesh, or a requested port is taken.
        DmscError: A tenant's mesh can't be started.
    """
    folder = StateFolder(options.mesh.state)
    trusted = options.mesh.trust_researchers
    way = way_here(trusted=trusted)
    with folder.hold():
        if folder.bus_token() is not None:
            raise BadInput(f"{folder.path} is a mesh's state folder; choose another one for a host (--state)")
        tenants = {name: folder.tenant(name) for name in options.tenants}
        folder.logs.mkdir(exist_ok=True)
        _make_folders(options, folder, tenants)
        started_at = time.time()
        number, limits = copies(options.mesh.servers), options.limits
        server = own_servers(
            options.mesh,
            folder,
            say,
            guard=folder.write_host_keys(),
            accounts=[NatsAccount(name=account_of(name), limits=limits) for name in tenants],
            copies=number,
            max_store_bytes=len(tenants) * number * limits.store_bytes,
            max_memory_bytes=len(tenants) * number * limits.memory_bytes,
        )
        async with (
            rotating(folder.logs),
            server as bus,
            _guarded(folder, tenants, [local(url) for url in bus.urls]),
        ):
            urls = [outer(local(url), options.mesh) for url in bus.urls]
            for tenant in tenants.values():
                tenant.write_host_servers(urls)
            async with _started(options, folder, tenants, say, progress, prefork_server) as supervisor:
                file = MeshFile(
                    servers=tuple(urls),
                    pid=os.getpid(),
                    started_at=started_at,
                    ready_at=time.time(),
                    sandbox=sentence(way, trusted=trusted, code=options.mesh.code),
                    tenants={name: str(tenant.path) for name, tenant in tenants.items()},
                )
                async with tended(folder, file, bus, supervisor, prefork_server) as host:
                    yield host


def _make_folders(options: HostOptions, folder: StateFolder, tenants: dict[str, StateFolder]) -> None:
    """Make the tenants' folders, each with its own root, keys and users, where these are missing."""
    if options.mesh.tls:
        certify(options.mesh, folder)
    for tenant in tenants.values():
        tenant.path.mkdir(parents=True, exist_ok=True)
        tenant.path.chmod(0o700)
        if not tenant.host_servers():
            tenant.write_host_servers(["not-started-yet"])  # before its tokens, so it gets no guard keys
        tenant.write_tokens()
        if options.mesh.tls:
            certify(options.mesh, tenant, by=folder)


@asynccontextmanager
async def _guarded(
    folder: StateFolder, tenants: dict[str, StateFolder], urls: list[str]
) -> AsyncIterator[None]:
    """Run the auth callout of all tenants' accounts for the block."""
    from entities.authorizer import AuthorizerConfig
    from entities.authorizer.tenant_guard import GUARD, Tenant, guarding_tenants

    for tenant in tenants.values():
        renewal.follow(tenant.bus_token(), tenant.path / "bus_token")
    accounts = [
        Tenant(
            account=account_of(name),
            users=AuthorizerConfig(
                tokens_file=tenant.tokens_file,
                user_key=tenant.path / layout.USER_KEY,
                servers=tuple(urls),
                bus_token=tenant.bus_token(),
                roots_file=tenant.roots_file,
                ends_old_roots=True,
                sid=GUARD,
            ),
        )
        for name, tenant in tenants.items()
    ]
    with guard_log(folder) as log:
        async with guarding_tenants(urls, folder.write_host_keys(), accounts, log):
            yield


@asynccontextmanager
async def _started(
    options: HostOptions,
    folder: StateFolder,
    tenants: dict[str, StateFolder],
    say: Say,
    progress: Say,
    prefork_server: PreforkServer | None,
) -> AsyncIterator[Supervisor]:
    """Start the tenants' meshes and wait until they are ready."""
    mesh = options.mesh
    count = len(tenants) * len(mesh.clusters)
    http_ports, remark = ports.choose(mesh.bind, mesh.http_port, HTTP_PORT, count, "--http-port")
    say_if(say, remark and f"{remark.partition(',')[0]}, the gateways take free ones")
    follow = mesh.http_port != 0 and not remark
    running = {name: pid for name, tenant in tenants.items() if (pid := tenant.owner()) is not None}
    for name, pid in running.items():
        say(f"the mesh of {name} runs already, by itself (pid {pid}); it is left alone")
    children = [
        tenant_child(name, tenant, mesh, http_ports[index * len(mesh.clusters)] if follow else 0)
        for index, (name, tenant) in enumerate(tenants.items())
        if name not in running
    ]
    async with Supervisor(
        children, logs=folder.logs, environment={}, say=say, prefork_server=prefork_server, times=TENANT_TIMES
    ) as supervisor:

        async def find_missing() -> str:
            missing = [name for name, tenant in tenants.items() if not _is_ready(tenant)]
            return f"not ready yet: {', '.join(missing)}" if missing else ""

        await supervisor.until_ready(find_missing, progress)
        yield supervisor


def tenant_child(name: str, folder: StateFolder, mesh: MeshOptions, http_port: int) -> ChildSpec:
    """The child process that runs `dmsc up` for a tenant.

    `http_port` is the port of the tenant's first gateway; 0: any.
    """
    own = option_words(
        mesh,
        *("slots", "clusters", "bind", "metrics_bind", "orchestrators", "registries", "separate", "policies"),
        "automation",
        *("code", "allow_urls", "trust_researchers", "instance_users", "topology", "access_file", "prices"),
    )
    metrics = "off" if mesh.metrics_port == "off" else "0"
    return ChildSpec(
        name=f"tenant-{name}",
        arguments=(
            *("up", "--state", str(folder.path), *own),
            *("--http-port", str(http_port), "--metrics-port", metrics),
        ),
        stop_order=0,
        may_leave=True,  # `dmsc down --state` of its folder stops one tenant
    )


def _is_ready(folder: StateFolder) -> bool:
    """Whether a mesh is ready. The file must be its present owner's: a killed mesh leaves its file behind."""
    file = folder.mesh()
    return file is not None and file.ready_at is not None and file.pid == folder.owner()
