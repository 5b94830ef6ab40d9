"""`dmsc cert`: a CA of one's own, and certificates for the bus and the gateways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmsc.console.options import JsonOption, print_json


def cert(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the CA is, or is to be.", show_default=False)
    ],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="What clients connect to: name or address; repeatable."),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, help="How long the certificate lasts.")
    ] = 397,
    json: JsonOption = False,
) -> None:
    """Make a local CA and a certificate for the bus's servers and the gateways.

    A CA that is there stays; run it again for other hosts, or before the certificate expires. Hand ca.pem to
    whoever connects: DMSC_CA_FILE=ca.pem. `dmsc up --tls` does all this for a mesh on this machine.

    Example: dmsc cert certificates --host mesh.example.org --host 10.0.0.5
    """
    from dmsc.state.certificates import make_certificates

    files = make_certificates(folder, host or ["localhost", "127.0.0.1", "::1"], days=days)
    if json:
        print_json({name: str(getattr(files, name)) for name in ("ca", "ca_key", "server", "server_key")})
        return
    print(f"{files.ca}          for everyone: DMSC_CA_FILE={files.ca}")
    print(f"{files.ca_key}      signs certificates; keep it private")
    print(f"{files.server}      for the bus's servers and the gateways, with {files.server_key}")
