"""New credentials for a mesh's own processes, while they run: a file for each in the state folder.

The supervisor writes, the process looks when it dials (`bus.security.renewal`); a node agent looks all the
time, gives its instances new ones, and says so beside the file.
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
    return folder.path / FOLDER / child


def give(folder: StateFolder, child: str, text: str) -> None:
    """What a child shows from its next dial on."""
    path = place_of(folder, child)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.chmod(0o700)
    write_private(path, text + "\n")


def forget(folder: StateFolder, child: str) -> None:
    """A child that starts is given the present credential: what is left of an earlier mesh counts no more."""
    place_of(folder, child).unlink(missing_ok=True)
    place_of(folder, child + TAKEN).unlink(missing_ok=True)


def has_taken(folder: StateFolder, child: str, text: str) -> bool:
    """Whether a node agent has this one, and its instances what follows from it; or was started with it."""
    if not place_of(folder, child).exists():
        return True
    try:
        return place_of(folder, child + TAKEN).read_text(encoding="ascii") == renewal.digest(text)
    except OSError:
        return False


def follow_renewals(token: str | None, whom: Sequence[Identity], credential: Path | None = None) -> None:
    """From here on this process shows what `$DMSC_RENEWAL`, or the file `credential`, says."""
    given = os.environ.get(VARIABLE)
    if given:
        path = Path(given)
        renewal.follow(token, path, told=path.with_name(path.name + TAKEN))
    elif credential is not None:
        renewal.follow(token, credential, make=lambda text: identities.own(text, whom))
