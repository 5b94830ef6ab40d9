"""What holds users' code on this machine, for those who start something or ask (ADR-0034)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from entities.cluster.fork_server_client import Confinement
from schemas.errors import BadInput
from workers.sandbox.confinement import ConfinementMethod, best_method, works
from workers.sandbox.users import parse_range

CHOICE = "DMSC_SANDBOX"
"""Environment variable: `landlock` or `own-user`, where it should not be the strictest that works."""
TRUST = "--trust-researchers"
REMEDY = f"a kernel with Landlock (Linux 5.13 or newer), or root, holds it; or take that risk with {TRUST}"


def way_here(*, trusted: bool = False) -> ConfinementMethod:
    """How users' code is confined here; `none` also where everybody who may submit jobs is trusted.

    Raises:
        BadInput: `$DMSC_SANDBOX` asks for a way that does not work here.
    """
    if trusted:
        return ConfinementMethod.NONE
    wanted = os.environ.get(CHOICE)
    if not wanted:
        return best_method()
    if wanted not in (ConfinementMethod.OWN_USER, ConfinementMethod.LANDLOCK) or not works(
        ConfinementMethod(wanted)
    ):
        raise BadInput(f"{CHOICE}={wanted}: this machine can't; leave it away, or {TRUST}")
    return ConfinementMethod(wanted)


def sentence(way: ConfinementMethod, *, trusted: bool, code: Sequence[str] = ()) -> str:
    """One line on what researchers' code could reach. `code`: the folders of `--code`."""
    if way is not ConfinementMethod.NONE:
        return f"{way}: {way.described}; its code lies in {_folders_of_code(code)}"
    who = f"researchers are trusted ({TRUST})" if trusted else f"so there are no researchers; {REMEDY}"
    return f"{way.described}; {who}"


def _folders_of_code(given: Sequence[str]) -> str:
    from workers.sandbox.kept_back import holds_home

    here = os.path.realpath(os.getcwd())
    folders = [os.path.abspath(os.path.expanduser(folder)) for folder in given]
    if not holds_home(here):
        return ", ".join(dict.fromkeys([here, *folders]))
    named = ", ".join(folders) or "no folder"
    return f"{named} (not in {here}, which holds more than code: --code DIR names a folder)"


def confinement(
    *, trusted: bool, users: str | None, closed: Iterable[Path], read: Iterable[str] = ()
) -> Confinement | None:
    """For a node agent; None: its users are trusted.

    Args:
        trusted: `--trust-researchers`.
        users: `--instance-users LO-HI`.
        closed: files and folders that hold what is not users'.
        read: folders that all jobs may read.

    Raises:
        BadInput: users' code can't be confined here, and is not trusted; or the range is none.
    """
    if trusted:
        return None
    if users:
        parse_range(users)
    way = way_here()
    if way is ConfinementMethod.NONE:
        raise BadInput(f"users' code can't be held on this machine: {REMEDY}")
    shut = tuple(dict.fromkeys(str(path.absolute()) for path in closed))
    return Confinement(way=way, users=users or "", closed=shut, read=tuple(read))


def closed_files(state: Path, *more: Path | None) -> list[Path]:
    """The state folder, the host's where it is a tenant's, and what else is named."""
    from dmsc.state.state_folder import StateFolder

    hosts = [state.absolute().parents[1]] if StateFolder(state).host_servers() else []
    return [state, *hosts, *(path for path in more if path is not None)]


def confine_module(source: str, state: Path | None) -> None:
    """Confines this process, a functional module's, before a file of policies is loaded in it.

    Raises:
        BadInput: it can't be, and is not trusted.
    """
    from dmsc.process.policy_loading import BUILT_IN
    from dmsc.state.state_folder import default_state
    from workers.sandbox.confinement import Reach, confine
    from workers.sandbox.users import DEFAULT_RANGE, lease

    if source in BUILT_IN:
        return
    way = way_here()
    if way is ConfinementMethod.NONE:
        raise BadInput(f"{source} can't be held on this machine: {REMEDY}")
    file = source.rpartition(":")[0] if ".py:" in source else source
    scratch = (state or default_state()).absolute() / "modules" / Path(file).stem
    closed = tuple(str(path.absolute()) for path in closed_files(state or default_state()))
    reach = Reach(read=(str(Path(file).absolute().parent),), closed=closed, scratch=str(scratch))
    taken = lease(DEFAULT_RANGE) if way is ConfinementMethod.OWN_USER else None
    _kept.append(taken)
    confine(reach, way, user=None if taken is None else taken.user)


_kept: list[object] = []
"""The mark of this process's user ends with the process."""
