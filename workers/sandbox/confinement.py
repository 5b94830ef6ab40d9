"""Decides how a process can be confined on this machine, and confines the calling process.

| method | files | other processes | temporary files |
|---|---|---|---|
| `own-user` (root) | a root of its own | a user of its own, hidden /proc | own /tmp, own /dev/shm |
| `landlock` | Landlock | Landlock; seccomp, if Landlock can't restrict signals | own folder, no /dev/shm |
| `none` | all of its user's | all of its user's | shared |

The first two have in common: no new privileges, a filter of system calls, no core dumps, no inherited
descriptors, and no process of the same user can read its memory. The network is open in all three: an
instance needs the bus and its peers.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from bus.parent_death import end_with_parent
from workers.sandbox import kernel, landlock, mounts, seccomp
from workers.sandbox.hidden_paths import hidden_paths, holds_home

CODE_PATH = "DMSC_CODE_PATH"
"""Environment variable: folders with user code, as in `PATH`; searched after the working directory."""

_CERTIFICATES = ("DMSC_CA_FILE", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PROCESSES = 4096
"""Most processes and threads of one instance's own user."""
_PROCESSES_OF_ALL = 8192
"""The same limit if the instance runs as the node's user, of which all processes count."""
_PROBE_USER = 61183


class ConfinementMethod(StrEnum):
    """How users' code is confined; see this module's table."""

    OWN_USER = "own-user"
    LANDLOCK = "landlock"
    NONE = "none"

    @property
    def described(self) -> str:
        """What users' code can reach, in one line."""
        return _DESCRIBED[self]


_DESCRIBED = {
    ConfinementMethod.OWN_USER: (
        "a system user of its own for each instance, in a root of its own: it reads its code, the "
        "installed packages and allowed folders, writes below its own job, and reaches the network"
    ),
    ConfinementMethod.LANDLOCK: (
        "Landlock: it reads its code, the installed packages, /etc and allowed folders, writes "
        "below its own job, and reaches the network; it has no /dev/shm"
    ),
    ConfinementMethod.NONE: "nothing holds it: it does whatever the user can do that runs the node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one process may reach besides the interpreter, its packages and its code.

    Args:
        read: Files and folders to read.
        write: Folders to write, created if they are missing.
        closed: Files and folders that it must not reach, even inside of the others.
        scratch: Its own folder for temporary files, created if missing; also its HOME.
        code: The folder of its job's own code, in place of the node's folders; empty: those.
        closed_code: With `code`, the node's folders of code. They are closed, also where they lie in a folder
            to read, unless they are named there themselves.
    """

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    scratch: str = ""
    code: str = ""
    closed_code: tuple[str, ...] = ()

    @classmethod
    def of(cls, order: dict[str, Any]) -> Reach:
        """The reach in the JSON of an order."""
        return cls(
            **{key: tuple(order.get(key, ())) for key in ("read", "write", "closed", "closed_code")},
            scratch=str(order.get("scratch", "")),
            code=str(order.get("code", "")),
        )


@cache
def best_method() -> ConfinementMethod:
    """The strictest method that works here; each is tried in a child process."""
    return next(
        (way for way in (ConfinementMethod.OWN_USER, ConfinementMethod.LANDLOCK) if works(way)),
        ConfinementMethod.NONE,
    )


def works(way: ConfinementMethod) -> bool:
    """Whether a process can be confined by this method here; tries it in a child process."""
    if not kernel.LINUX or not seccomp.known() or (way is ConfinementMethod.OWN_USER and os.geteuid() != 0):
        return False
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            confine(Reach(), way, user=_PROBE_USER)
            code = 0
        except BaseException:  # whatever the error, this method does not work
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def confine(
    reach: Reach, way: ConfinementMethod, *, user: int | None = None, parent: int | None = None
) -> None:
    """Confines this process, which must have one thread, irreversibly.

    Args:
        reach: What it may still reach.
        way: The method; not `none`.
        user: For `own-user`: the id of its user, which no other process has.
        parent: The process whose death ends this one; if it is dead already, this process ends now. None:
            it ends with no other process.

    Raises:
        OSError: The system refuses; users' code must not run then.
    """
    os.umask(0o022)
    for folder in reach.write:
        os.makedirs(folder, exist_ok=True)
    if reach.scratch:
        os.makedirs(reach.scratch, mode=0o700, exist_ok=True)
    paths = _Paths.of(reach)
    _set_environment(reach.scratch)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if way is ConfinementMethod.OWN_USER:
        assert user is not None
        _own_user(user, paths)
        resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))
    else:
        _lower(resource.RLIMIT_NPROC, _PROCESSES_OF_ALL)
        if os.geteuid() == 0:
            kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.keep_private()
    landlock_version = landlock.version()
    if way is ConfinementMethod.LANDLOCK and not landlock_version:
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    if way is ConfinementMethod.OWN_USER:
        if landlock_version:
            landlock.restrict(_rules_in_own_root(paths))
        seccomp.restrict(signals=True)
    else:
        _fence(paths, signals=landlock_version >= landlock.SCOPES_SIGNALS)
    if parent is not None:
        end_with_parent(parent, signal.SIGKILL)  # again, since a change of user clears it


def _lower(limit: int, most: int) -> None:
    """Lowers a limit to `most`, unless it is lower already."""
    _, hard = resource.getrlimit(limit)
    lower = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (lower, lower))


def close_descriptors() -> None:
    """Closes all but standard input, output and error."""
    highest = max((int(name) for name in os.listdir("/proc/self/fd")), default=2)
    os.closerange(3, highest + 1)


def _own_user(user: int, paths: _Paths) -> None:
    groups = mounts.device_groups()
    mounts.enter(mounts.Plan(paths.read, paths.write, paths.closed, user, paths.links))
    os.setgroups(groups)
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _fence(paths: _Paths, *, signals: bool) -> None:
    landlock.restrict(_rules(paths))
    seccomp.restrict(signals=signals)


_OF_OTHERS = (
    *("SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR"),
    # torch's compiler: the fork server's import has set it, to a folder that only one of the users may write
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
)
"""Variables that name what is another's; without the last two, torch finds a folder below TMPDIR again."""


def _set_environment(scratch: str) -> None:
    os.environ.update(USER="dmsc-instance", LOGNAME="dmsc-instance")
    for name in _OF_OTHERS:
        os.environ.pop(name, None)
    if scratch:
        os.environ.update(HOME=scratch, TMPDIR=scratch, XDG_CACHE_HOME=f"{scratch}/.cache")
        tempfile.tempdir = None


# --- paths ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Paths:
    """A reach as absolute, resolved, existing paths."""

    read: tuple[str, ...]
    write: tuple[str, ...]
    closed: tuple[str, ...]
    links: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def of(cls, reach: Reach) -> _Paths:
        write = _resolved((*reach.write, *filter(None, [reach.scratch])))
        installed = _resolved(_interpreter())
        code = _resolved(_code(reach.code))
        folders = tuple(dict.fromkeys((*code, *_resolved(reach.read))))
        closed_code = _resolved(path for path in reach.closed_code if not _holds_system(path))
        closed = {os.path.realpath(path) for path in reach.closed} | {*closed_code} - {*folders}
        visible = {*installed, *folders, *write}
        for folder in folders:
            if os.path.isdir(folder) and not mounts.below(folder, (*installed, *mounts.SYSTEM)):
                closed |= set(hidden_paths(folder, code=folder in (*code, *closed_code), visible=visible))
        links = []
        for path in (*reach.read, *reach.write):
            absolute = os.path.abspath(path)
            if os.path.realpath(absolute) != absolute:
                links.append((absolute, os.path.realpath(absolute)))
        read = tuple(path for path in dict.fromkeys((*installed, *folders)) if path not in write)
        return cls(read, write, tuple(sorted(closed)), tuple(links))


def _resolved(paths: Iterable[str]) -> tuple[str, ...]:
    real_paths = dict.fromkeys(os.path.realpath(path) for path in paths if path)
    return tuple(path for path in real_paths if path != "/" and os.path.exists(path))


def _interpreter() -> Iterator[str]:
    yield from (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    yield os.path.dirname(os.path.realpath(sys.executable))
    yield os.path.realpath("/etc/resolv.conf")
    yield from (os.environ.get(name, "") for name in _CERTIFICATES)
    yield from os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)


def _holds_system(folder: str) -> bool:
    """Whether a working directory is a home, or holds what every process needs: it is no folder of code."""
    return holds_home(folder) or any(mounts.below(path, [folder]) for path in mounts.SYSTEM)


def _code(own: str) -> Iterator[str]:
    """Folders of code; a home folder counts only if it is named, not as the working directory.

    Args:
        own: The folder of the job's own code. `workers.user_code.use_only` has taken the node's folders out
            of `sys.path` then.
    """
    directory = () if own else (os.getcwd(),)
    implied = (os.path.realpath(path) for path in (*filter(None, sys.path), *directory))
    yield from (path for path in implied if not holds_home(path))
    yield own
    yield from os.environ.get(CODE_PATH, "").split(os.pathsep)


# --- Landlock's rules -----------------------------------------------------------------------------------
def _rules_in_own_root(paths: _Paths) -> Iterator[tuple[str, int]]:
    """Rules for an own root, which holds only allowed files: Landlock restricts access to other processes."""
    yield "/", landlock.READ
    yield "/dev", landlock.USE
    for path in (*paths.write, "/tmp", "/dev/shm"):
        yield path, landlock.READ | landlock.CHANGE


def _rules(paths: _Paths) -> Iterator[tuple[str, int]]:
    for path in mounts.SYSTEM:
        if path == "/etc" and os.geteuid() == 0:
            yield from ((public_path, landlock.READ) for public_path in _public(path))
        else:
            yield os.path.realpath(path), landlock.READ
    yield "/proc", landlock.READ
    for path in paths.read:
        yield from _spread(path, [closed for closed in paths.closed if mounts.below(closed, [path])])
    for path in mounts.devices():
        yield path, landlock.USE
    for path in paths.write:
        yield path, landlock.READ | landlock.CHANGE


def _public(folder: str) -> Iterator[str]:
    """World-readable entries of a folder: an instance must not read root's secrets."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_symlink() and entry.stat().st_mode & stat.S_IROTH:
                yield entry.path


def _spread(folder: str, closed: list[str]) -> Iterator[tuple[str, int]]:
    """Rules for a folder without its closed parts: a rule for a folder can't be revoked below it."""
    if not closed:
        yield folder, landlock.READ
        return
    if folder in closed:
        return
    yield folder, landlock.LIST
    start = folder.rstrip("/") + "/"
    inside: dict[str, list[str]] = {}
    for path in closed:
        inside.setdefault(path.removeprefix(start).partition("/")[0], []).append(path)
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_symlink():
                yield from _spread(entry.path, inside.get(entry.name, []))
