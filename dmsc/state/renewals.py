"""New credentials for a mesh's running processes: each process has a file in the state folder.

The supervisor writes the file, and the process reads it whenever it connects (`bus.security.renewal`). A node
agent polls its file, gives its instances new credentials, and then writes a confirmation beside the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bus.security import renewal
from bus.security.identity import Identity
from dmsc.state import identities
from dmsc.state.state_folder import StateFolder, write_private

FOLDER = "renewals"
VARIABLE = "DMSC_RENEWAL"
TAKEN = ".taken"


def place_of(folder: StateFolder, child: str) -> Path:
    """The file of a child's new credential."""
    return folder.path / FOLDER / child


def give(folder: StateFolder, child: str, text: str) -> None:
    """Write the credential with which a child connects from now on."""
    path = place_of(folder, child)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.chmod(0o700)
    write_private(path, text + "\n")


def forget(folder: StateFolder, child: str) -> None:
    """Remove a child's files from an earlier mesh; a starting child gets the current credential directly."""
    place_of(folder, child).unlink(missing_ok=True)
    place_of(folder, child + TAKEN).unlink(missing_ok=True)


def has_taken(folder: StateFolder, child: str, text: str) -> bool:
    """Whether a node agent has this credential and has given its instances new ones.

    An agent without a file was started with this credential.
    """
    if not place_of(folder, child).exists():
        return True
    try:
        return place_of(folder, child + TAKEN).read_text(encoding="ascii") == renewal.digest(text)
    except OSError:
        return False


def follow_renewals(token: str | None, whom: Sequence[Identity], credential: Path | None = None) -> None:
    """Let this process use new credentials from the file `$DMSC_RENEWAL`, else from the file `credential`."""
    place = os.environ.get(VARIABLE)
    if place:
        path = Path(place)
        renewal.follow(token, path, told=path.with_name(path.name + TAKEN))
    elif credential is not None:
        renewal.follow(token, credential, make=lambda text: identities.own(text, whom))
