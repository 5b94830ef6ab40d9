"""How users' code is confined on this machine (ADR-0034): used to start processes, and to report it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from entities.cluster.fork_server_client import Confinement
from schemas.errors import BadInput
from workers.sandbox.confinement import ConfinementMethod, best_method, works
from workers.sandbox.users import parse_range

CHOICE = "DMSC_SANDBOX"
"""Environment variable: `landlock` or `own-user`; without it, the strictest method that works is used."""
TRUST = "--trust-researchers"
REMEDY = f"a kernel with Landlock (Linux 5.13 or newer), or root, holds it; or take that risk with {TRUST}"


def way_here(*, trusted: bool = False) -> ConfinementMethod:
    """How users' code is confined here; `none` also if everyone who may submit jobs is trusted.

    Raises:
        BadInput: `$DMSC_SANDBOX` requests a method that does not work here.
    """
    if trusted:
        return ConfinementMethod.NONE
    choice = os.environ.get(CHOICE)
    if not choice:
        return best_method()
    if choice not in (ConfinementMethod.OWN_USER, ConfinementMethod.LANDLOCK) or not works(
        ConfinementMethod(choice)
    ):
        raise BadInput(f"{CHOICE}={choice}: this machine can't; leave it away, or {TRUST}")
    return ConfinementMethod(choice)


def sentence(way: ConfinementMethod, *, trusted: bool, code: Sequence[Path] = ()) -> str:
    """Describe in one line what researchers' code could reach. `code` has the folders of `--code`."""
    if way is not ConfinementMethod.NONE:
        return f"{way}: {way.described}; its code lies in {_folders_of_code(code)}"
    who = f"researchers are trusted ({TRUST})" if trusted else f"so there are no researchers; {REMEDY}"
    return f"{way.described}; {who}"


def _folders_of_code(code: Sequence[Path]) -> str:
    from workers.sandbox.hidden_paths import holds_home

    here = os.path.realpath(os.getcwd())
    folders = [os.path.abspath(os.path.expanduser(folder)) for folder in code]
    if not holds_home(here):
        return ", ".join(dict.fromkeys([here, *folders]))
    named = ", ".join(folders) or "no folder"
    return f"{named} (not in {here}, which holds more than code: --code DIR names a folder)"


def confinement(
    *, trusted: bool, users: str | None, closed: Iterable[Path], read: Iterable[str] = ()
) -> Confinement | None:
    """The confinement of users' code for a node agent; None if users are trusted.

    Args:
        trusted: The option `--trust-researchers`.
        users: The option `--instance-users LO-HI`.
        closed: Files and folders that users' code must not see.
        read: Folders that all jobs may read.

    Raises:
        BadInput: Users' code can't be confined here and is not trusted, or the range is not well-formed.
    """
    if trusted:
        return None
    if users:
        parse_range(users)
    way = way_here()
    if way is ConfinementMethod.NONE:
        raise BadInput(f"users' code can't be held on this machine: {REMEDY}")
    paths = tuple(dict.fromkeys(str(path.absolute()) for path in closed))
    return Confinement(way=way, users=users or "", closed=paths, read=tuple(read))


def closed_files(state: Path, *more: Path | None) -> list[Path]:
    """What users' code must not see: the state folder, the host's folder if this is a tenant, and `more`."""
    from dmsc.state.state_folder import StateFolder

    hosts = [state.absolute().parents[1]] if StateFolder(state).host_servers() else []
    return [state, *hosts, *(path for path in more if path is not None)]


def confine_module(source: str, state: Path | None) -> None:
    """Confine this process, which runs a functional module, before a user's policy file is loaded into it.

    Raises:
        BadInput: The process can't be confined.
    """
    from dmsc.process.policy_loading import file_and_class
    from dmsc.state.state_folder import default_state
    from workers.sandbox.confinement import Reach, confine
    from workers.sandbox.users import DEFAULT_RANGE, lease

    file, _ = file_and_class(source)
    if not file:  # a built-in policy, or nothing
        return
    way = way_here()
    if way is ConfinementMethod.NONE:
        raise BadInput(f"{source} can't be held on this machine: {REMEDY}")
    scratch = (state or default_state()).absolute() / "modules" / Path(file).stem
    closed = tuple(str(path.absolute()) for path in closed_files(state or default_state()))
    reach = Reach(read=(str(Path(file).absolute().parent),), closed=closed, scratch=str(scratch))
    user_lease = lease(DEFAULT_RANGE) if way is ConfinementMethod.OWN_USER else None
    _leases.append(user_lease)
    confine(reach, way, user=None if user_lease is None else user_lease.user)


_leases: list[object] = []
"""Keeps the lease of this process's system user until the process ends."""
