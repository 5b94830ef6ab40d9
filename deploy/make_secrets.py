"""Fills a folder with a mesh's secrets, once: the administrator's token, the bus's, and NATS's share of it.

    python make_secrets.py /run/dmsc

What is there stays, so that a restart changes no token.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bus.departures import access_clause
from dmsc.state_folder import StateFolder


def main() -> None:
    """Writes token, bus_token, tokens.yaml and nats-auth.conf."""
    folder = StateFolder(Path(sys.argv[1]))
    folder.write_tokens()
    clause = folder.path / "nats-auth.conf"
    # the volume is shared by the mesh's own containers alone; the server runs as another user than they do
    clause.write_text("\n".join(access_clause(folder.bus_token())) + "\n")
    print(f"secrets are in {folder.path}")


if __name__ == "__main__":
    main()
