"""Finds the mesh that a command means: from arguments, then the environment, then the state folder.

DMSC_GATEWAY, DMSC_TOKEN     a gateway's HTTP API and the user's token
DMSC_BUS, DMSC_BUS_TOKEN     the bus (NATS) and its token
DMSC_STATE                   the state folder of a mesh on this machine
DMSC_CA_FILE                 the CA that signs the certificates of a mesh with TLS (`bus.nats.tls_trust`)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmsc.state.state_folder import MeshFile, StateFolder


@dataclass(frozen=True, kw_only=True)
class BusAddress:
    """The bus's servers and the token with which to connect."""

    servers: tuple[str, ...]
    token: str | None = None


@dataclass(frozen=True, kw_only=True)
class GatewayAddress:
    """Gateways to try in order, and the user's token."""

    urls: tuple[str, ...]
    token: str | None = None


def find_bus(
    servers: str | Sequence[str] | None = None, token: str | None = None, state: Path | None = None
) -> BusAddress:
    """The bus to connect to, and the token to use.

    If no bus token is found, the user's own token is used, and the bus permits what the user's role may.

    Raises:
        BusUnreachable: No address is known.
    """
    from schemas.errors import BusUnreachable

    folder = StateFolder(state)
    named = _split(servers) or (() if state else _split(os.environ.get("DMSC_BUS")))
    if named:
        own_token = folder.bus_token() if _own(named, folder) else None
        chosen = token or os.environ.get("DMSC_BUS_TOKEN") or own_token or os.environ.get("DMSC_TOKEN")
        return BusAddress(servers=named, token=chosen or None)
    mesh = _mesh_of(folder)
    if mesh is None:
        raise BusUnreachable(
            f"no mesh runs on {folder.path}: start one with `dmsc up`, or name its bus with --bus (DMSC_BUS)"
        )
    from bus.security import renewal

    root = folder.bus_token()
    renewal.follow(root, folder.path / "bus_token")
    return BusAddress(servers=mesh.servers, token=token or root)


def find_gateway(
    url: str | Sequence[str] | None = None, token: str | None = None, state: Path | None = None
) -> GatewayAddress:
    """The gateways to connect to, and the user's token. Raises `Unavailable` if no address is known."""
    from schemas.errors import Unavailable

    folder = StateFolder(state)
    named = _split(url) or (() if state else _split(os.environ.get("DMSC_GATEWAY")))
    if named:
        own_token = folder.token() if _own(named, folder) else None
        return GatewayAddress(urls=named, token=token or os.environ.get("DMSC_TOKEN") or own_token)
    mesh = _mesh_of(folder)
    if mesh is None or not mesh.gateways:
        raise Unavailable(
            f"no mesh runs on {folder.path}: start one with `dmsc up`, or name its gateway with --gateway"
            " (or DMSC_GATEWAY)"
        )
    environment = None if state else os.environ.get("DMSC_TOKEN")
    return GatewayAddress(urls=tuple(mesh.gateways.values()), token=token or environment or folder.token())


def read_token(path: Path) -> str:
    """Read the credential in a file. Raises `BadInput` if there is none."""
    from schemas.errors import BadInput

    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or 'not a text'}") from None
    if not text:
        raise BadInput(f"{path}: is empty; a credential is made with `dmsc credential`")
    return text


def _mesh_of(folder: StateFolder) -> MeshFile | None:
    """The mesh that runs on a folder, None if there is none. Raises `BadInput` if it is a host of tenants."""
    mesh = folder.mesh()
    _trust_own_ca(folder)
    if mesh is not None and mesh.tenants:
        from schemas.errors import BadInput

        places = " or ".join(f"--state '{place}'" for place in mesh.tenants.values())
        raise BadInput(f"{folder.path} hosts the meshes of several tenants: say whose by {places}")
    return mesh


def _trust_own_ca(folder: StateFolder) -> None:
    """Trust the folder's own CA, if there is one and DMSC_CA_FILE names no other."""
    ca = folder.path / "tls" / "ca.pem"
    if ca.exists():
        from bus.nats.tls_trust import believe

        believe(ca)


def _own(named: tuple[str, ...], folder: StateFolder) -> bool:
    """Whether these addresses belong to the folder's own mesh. Its secrets are sent to no other address."""
    mesh = folder.mesh()
    if mesh is None:
        return False
    addresses = {*mesh.servers, *mesh.gateways.values()}
    return all(address.rstrip("/") in addresses for address in named)


def _split(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())
