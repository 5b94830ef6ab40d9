"""Several meshes on one server, each a tenant in its own account: `dmsc up --tenant NAME …` (ADR-0028).

The host is the server, its guard in this process, and a `dmsc up` per tenant, on a state folder of its own
below the host's.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bus.files.plain_files import APPEND, plain
from bus.guard.accounts import AccountLimits, NatsAccount, account_of, least_store_bytes
from bus.security import renewal
from bus.server.embedded_cluster import copies
from dmsc.launch import layout, ports
from dmsc.launch.layout import ChildSpec, MeshOptions
from dmsc.launch.log_rotation import rotating
from dmsc.launch.mesh import HTTP_PORT, RunningMesh, Say, certify, local, outer, own_servers, say_if, tended
from dmsc.launch.prefork_server import PreforkServer
from dmsc.launch.supervisor import Supervisor
from dmsc.process.sandboxing import sentence, way_here
from dmsc.state.state_folder import MeshFile, StateFolder
from schemas.base import is_token
from schemas.errors import BadInput

STORE_BYTES, MEMORY_BYTES, CONNECTIONS = 64 << 30, 1 << 30, 1 << 16
"""Of the server; the tenants share them equally, but for a quota that is asked for."""
STOP_S = 35.0
"""A tenant's mesh ends in order within this; its parts have less."""
GIB = 1 << 30

_look_every_s = 0.1


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """What `dmsc up --tenant …` was asked for.

    `mesh` is for each tenant, but for its state folder, which is the host's.
    """

    tenants: tuple[str, ...]
    mesh: MeshOptions
    quota_bytes: int | None = None  # on disk, per tenant and copy; None: an equal share

    def __post_init__(self) -> None:
        """
        Raises:
            BadInput: names that can't be, or less than a mesh's streams reserve.
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
        """Of each tenant."""
        share = len(self.tenants)
        return AccountLimits(
            store_bytes=self.quota_bytes or STORE_BYTES // share,
            memory_bytes=MEMORY_BYTES // share,
            connections=CONNECTIONS // share,
        )


@asynccontextmanager
async def running_host(
    options: HostOptions, say: Say, progress: Say | None = None, zygote: PreforkServer | None = None
) -> AsyncIterator[RunningMesh]:
    """Start the server, its guard, and the tenants' meshes; stop them when the block ends.

    Raises:
        BadInput: the state folder is in use or a mesh's, a port that was asked for is taken.
        DmscError: a tenant's mesh can't be started.
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
            for each in tenants.values():
                each.write_host_servers(urls)
            async with _started(options, folder, tenants, say, progress, zygote) as supervisor:
                file = MeshFile(
                    servers=tuple(urls),
                    pid=os.getpid(),
                    started_at=started_at,
                    ready_at=time.time(),
                    sandbox=sentence(way, trusted=trusted, code=options.mesh.code),
                    tenants={name: str(each.path) for name, each in tenants.items()},
                )
                async with tended(folder, file, bus, supervisor, zygote) as host:
                    yield host


def _make_folders(options: HostOptions, folder: StateFolder, tenants: dict[str, StateFolder]) -> None:
    """With roots, keys and users of their own, where they are missing."""
    if options.mesh.tls:
        certify(options.mesh, folder)
    for each in tenants.values():
        each.path.mkdir(parents=True, exist_ok=True)
        each.path.chmod(0o700)
        if not each.host_servers():
            each.write_host_servers(["not-started-yet"])  # before its tokens: it gets no guard's keys
        each.write_tokens()
        if options.mesh.tls:
            certify(options.mesh, each, by=folder)


@asynccontextmanager
async def _guarded(
    folder: StateFolder, tenants: dict[str, StateFolder], urls: list[str]
) -> AsyncIterator[None]:
    from entities.authorizer import AuthorizerConfig
    from entities.authorizer.tenant_guard import GUARD, Tenant, guarding_tenants

    for each in tenants.values():
        renewal.follow(each.bus_token(), each.path / "bus_token")
    known = [
        Tenant(
            account=account_of(name),
            users=AuthorizerConfig(
                tokens_file=each.tokens_file,
                user_key=each.path / layout.USER_KEY,
                servers=tuple(urls),
                bus_token=each.bus_token(),
                roots_file=each.roots_file,
                ends_old_roots=True,
                sid=GUARD,
            ),
        )
        for name, each in tenants.items()
    ]
    with os.fdopen(plain(folder.logs / "guard.log", APPEND), "a", encoding="utf-8") as record:

        def tell(event: str, **fields: str) -> None:
            record.write(json.dumps({"timestamp": time.time(), "event": event, **fields}) + "\n")
            record.flush()

        async with guarding_tenants(urls, folder.write_host_keys(), known, tell):
            yield


@asynccontextmanager
async def _started(
    options: HostOptions,
    folder: StateFolder,
    tenants: dict[str, StateFolder],
    say: Say,
    progress: Say | None,
    zygote: PreforkServer | None,
) -> AsyncIterator[Supervisor]:
    """The tenants' meshes, ready."""
    mesh = options.mesh
    wanted = len(tenants) * len(mesh.clusters)
    found, remark = ports.choose(mesh.bind, mesh.http_port, HTTP_PORT, wanted, "--http-port")
    say_if(say, remark and f"{remark.partition(',')[0]}, the gateways take free ones")
    follow = mesh.http_port != 0 and not remark
    running = {name: pid for name, each in tenants.items() if (pid := each.owner()) is not None}
    for name, pid in running.items():
        say(f"the mesh of {name} runs already, by itself (pid {pid}); it is left alone")
    children = [
        tenant_child(name, each, mesh, found[index * len(mesh.clusters)] if follow else 0)
        for index, (name, each) in enumerate(tenants.items())
        if name not in running
    ]
    async with Supervisor(
        children, logs=folder.logs, environment={}, say=say, zygote=zygote, grace_s=STOP_S
    ) as supervisor:
        await _until_ready(supervisor, tenants, progress)
        yield supervisor


def tenant_child(name: str, folder: StateFolder, mesh: MeshOptions, http_port: int) -> ChildSpec:
    """The `dmsc up` of a tenant. `http_port`: its first gateway's; 0: any."""
    metrics = "off" if mesh.metrics_port is None else "0"
    return ChildSpec(
        name=f"tenant-{name}",
        arguments=(
            *("up", "--state", str(folder.path), "--slots", str(mesh.slots)),
            *_repeated("--cluster", mesh.clusters),
            *("--http-port", str(http_port), "--bind", mesh.bind),
            *("--metrics-port", metrics, "--metrics-bind", mesh.metrics_bind),
            *("--orchestrators", str(mesh.orchestrators), "--registries", str(mesh.registries)),
            *(("--separate",) if mesh.separate else ()),
            *_repeated("--policy", mesh.policies),
            *_repeated("--code", mesh.code),
            *_repeated("--allow-url", mesh.allow_urls),
            *(("--trust-researchers",) if mesh.trust_researchers else ()),
            *(() if mesh.instance_users is None else ("--instance-users", mesh.instance_users)),
            *(() if mesh.access_file is None else ("--access-file", str(mesh.access_file))),
        ),
        stop_order=0,
        may_leave=True,  # `dmsc down --state` of its folder stops one tenant
    )


def _repeated(option: str, values: Sequence[str]) -> tuple[str, ...]:
    return tuple(each for value in values for each in (option, value))


async def _until_ready(supervisor: Supervisor, tenants: dict[str, StateFolder], progress: Say | None) -> None:
    told = ""
    while True:
        if supervisor.failed.done():
            supervisor.failed.result()
        missing = [name for name, each in tenants.items() if not _is_ready(each)]
        if not missing:
            return
        text = f"not ready yet: {', '.join(missing)}"
        if progress is not None and text != told:
            told = text
            progress(text)
        await asyncio.wait({supervisor.failed}, timeout=_look_every_s)


def _is_ready(folder: StateFolder) -> bool:
    """By the present owner's own account; one that was killed leaves its own behind."""
    file = folder.mesh()
    return file is not None and file.ready_at is not None and file.pid == folder.owner()
