"""A mesh that is one of several on a server (ADR-0028): where its bus is, and that it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError, Unavailable

_patience_s = 10.0


@dataclass
class HostsBus:
    """The servers of a host whose tenant this mesh is: started, kept and guarded there."""

    urls: tuple[str, ...]
    servers: tuple[EmbeddedServer, ...] = ()
    restarted: Callable[[], None] = lambda: None


async def hosts_bus(folder: StateFolder) -> HostsBus:
    """The bus of a tenant's folder, which lets it in.

    Raises:
        Unavailable: the host is not there, or does not know this tenant.
    """
    urls = folder.host_servers()
    try:
        async with Bus.connect(
            urls, name="up", kind=EntityKind.CLIENT, token=folder.bus_token(), connect_timeout_s=_patience_s
        ):
            return HostsBus(urls)
    except DmscError as error:
        raise Unavailable(f"{error.text}; does the host of {folder.path} run, with this tenant?") from None


def not_one_mesh(folder: StateFolder) -> BadInput:
    """The error for one mesh on the folder of a host."""
    named = " ".join(f"--tenant {name}" for name in folder.tenants())
    return BadInput(
        f"{folder.path} is that of a host of tenants: start it with {named}, or take another folder"
    )
