"""`dmsc cert`: makes a local CA, and certificates for the bus and the gateways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from dmsc.console.command_app import argument, option
from dmsc.console.option_groups import JsonOutput


def cert(
    folder: Annotated[Path, argument("DIR", "The folder of the CA; it is made if it is missing.")],
    host: Annotated[
        list[str] | None,
        option("--host NAME", "A host name or address to which clients connect; repeatable (localhost)."),
    ] = None,
    days: Annotated[int, option("--days", "How many days the certificate is valid.", min=1, max=3650)] = 397,
    output: JsonOutput = JsonOutput(),
) -> None:
    """Make a local CA and a certificate for the bus's servers and the gateways.

    An existing CA is kept. Run the command again for other hosts, or before the certificate expires. Clients
    need ca.pem, and DMSC_CA_FILE=ca.pem in their environment. `dmsc up --tls` does all this for a mesh on
    this machine.

    Example: dmsc cert certificates --host mesh.example.org --host 10.0.0.5
    """
    from dmsc.state.certificates import make_certificates

    files = make_certificates(folder, host or ["localhost", "127.0.0.1", "::1"], days=days)
    output.show(
        {name: str(getattr(files, name)) for name in ("ca", "ca_key", "server", "server_key")},
        f"{files.ca}          for everyone: DMSC_CA_FILE={files.ca}",
        f"{files.ca_key}      signs certificates; keep it private",
        f"{files.server}      for the bus's servers and the gateways, with {files.server_key}",
    )
