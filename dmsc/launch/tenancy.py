"""A mesh that is a tenant of a host (ADR-0028): finds the host's bus and checks that it can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind
from schemas.errors import BadInput, DmscError, Unavailable


@dataclass
class HostsBus:
    """The bus of a tenant's host. The host starts, supervises and guards the servers."""

    urls: tuple[str, ...]
    servers: tuple[EmbeddedServer, ...] = ()
    restarted: Callable[[], None] = lambda: None


async def hosts_bus(folder: StateFolder, *, patience_s: float = 10.0) -> HostsBus:
    """Connect to the bus of a tenant's host to check it, and return it.

    Raises:
        Unavailable: The host does not run, or does not know this tenant.
    """
    urls = folder.host_servers()
    try:
        async with Bus.connect(
            urls, name="up", kind=EntityKind.CLIENT, token=folder.bus_token(), connect_timeout_s=patience_s
        ):
            return HostsBus(urls)
    except DmscError as error:
        raise Unavailable(f"{error.text}; does the host of {folder.path} run, with this tenant?") from None


def not_one_mesh(folder: StateFolder) -> BadInput:
    """The error for starting one mesh on the folder of a host."""
    named = " ".join(f"--tenant {name}" for name in folder.tenants())
    return BadInput(
        f"{folder.path} is that of a host of tenants: start it with {named}, or take another folder"
    )
