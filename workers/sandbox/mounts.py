"""An own root for a process, in a mount namespace: it contains only what is mounted into it.

Folders appear at their own paths. Folders of a job or of the operator are mapped (mount_setattr(2), idmapped
mounts): the process's user sees them as their owner does, and files that it writes belong to that owner. So
owners and modes need no change, and the temporary user id never gets onto a disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.sandbox.kernel import call, function

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
_MNT_DETACH = 2
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_CLONE_TREE, _MOVE_EMPTY_PATH = 1, 4
_RDONLY, _NOSUID, _NODEV, _IDMAP = 1, 2, 4, 0x100000

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/sys")
"""System folders, mounted read-only as they are: file modes protect their secrets from the process's user."""
DEVICES = ("null", "zero", "full", "random", "urandom")
ACCELERATORS = ("nvidia*", "dri", "kfd", "infiniband")
_SMALL = "size=64m"


@dataclass(frozen=True, slots=True)
class Plan:
    """The content of the new root besides the system's folders; all paths are absolute and resolved.

    `closed` files and folders appear empty inside of readable folders; a path below one of them is visible
    only if it is named itself.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    closed: tuple[str, ...]
    user: int
    links: tuple[tuple[str, str], ...] = ()
    """(path, target) of symbolic links: other names of the paths above."""


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_namespace", ctypes.c_uint64),
    ]


def devices() -> list[str]:
    """The device files and folders that exist here and that a model may use."""
    basic = [f"/dev/{name}" for name in DEVICES]
    return [path for path in basic if os.path.exists(path)] + [
        str(path) for pattern in ACCELERATORS for path in sorted(Path("/dev").glob(pattern))
    ]


def device_groups() -> list[int]:
    """Groups that a user needs to use these devices."""
    groups = set()
    for path in devices():
        for file in [Path(path), *(Path(path).iterdir() if os.path.isdir(path) else ())]:
            status = file.stat()
            if status.st_gid and status.st_mode & stat.S_IWGRP:
                groups.add(status.st_gid)
    return sorted(groups)


def enter(plan: Plan) -> None:
    """Moves this process, which must have one thread and be root, into the new root; it stays user root.

    Raises:
        OSError: The system does not allow it, or is too old.
    """
    directory = os.getcwd()
    function("unshare", ctypes.c_int(_CLONE_NEWNS))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    new = next(path for path in ("/mnt", "/media", "/srv", "/tmp") if os.path.isdir(path))
    trees = _trees(plan)  # from the old root, before anything covers it
    _mount("root", new, "tmpfs", _MS_NOSUID, f"mode=0755,{_SMALL}")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), new + path)
        elif os.path.isdir(path):
            _attach(_tree(path, _RDONLY | _NOSUID | _NODEV), path, new)
    _make_devices(new)
    os.mkdir(f"{new}/proc")
    _mount("proc", f"{new}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "hidepid=2")
    for path in ("/tmp", "/run"):
        os.makedirs(new + path, exist_ok=True)
    _mount("tmp", f"{new}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=1777,{_SMALL}")
    os.makedirs(f"{new}/var", exist_ok=True)
    os.symlink("/tmp", f"{new}/var/tmp")
    for path, tree in trees:
        if tree is None:
            _cover(path, new)
        else:
            _attach(tree, path, new)
    for path, target in plan.links:
        if not os.path.lexists(new + path):
            os.makedirs(os.path.dirname(new + path), exist_ok=True)
            os.symlink(target, new + path)
    os.makedirs(new + directory, exist_ok=True)  # relative paths stay what they are, whatever is shown there
    os.chdir(new)
    call(_PIVOT_ROOT[os.uname().machine], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    function("umount2", ctypes.c_char_p(b"."), ctypes.c_int(_MNT_DETACH))
    os.chdir("/")
    _set(_AT_FDCWD, "/", 0, _RDONLY)
    with contextlib.suppress(OSError):
        os.chdir(directory)


def _trees(plan: Plan) -> list[tuple[str, int | None]]:
    """(path, detached mount; None: to be covered), outer folders before inner ones."""
    visible = [*(path for path in plan.read if not below(path, SYSTEM)), *plan.write]
    with contextlib.closing(MountMapper(plan.user)) as mapped:
        trees: dict[str, int | None] = {}
        for path in plan.closed:
            if below(path, (*visible, *SYSTEM)) and os.path.lexists(path):
                trees[path] = None
        for path in visible:
            attributes = _NOSUID | _NODEV | (0 if path in plan.write else _RDONLY)
            trees[path] = mapped(path, attributes)
    return sorted(trees.items(), key=lambda item: item[0].count("/") if item[0] != "/" else 0)


def below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of these folders, or inside of one."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


class MountMapper:
    """Makes mounts in which files of a folder's owner appear to belong to the user `own`."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._namespaces: dict[tuple[int, int], int] = {}

    def __call__(self, path: str, attributes: int) -> int:
        """A detached mount of `path`, mapped if its file system supports that."""
        owner = os.stat(path)
        key = owner.st_uid, owner.st_gid
        if key not in self._namespaces:
            self._namespaces[key] = _user_namespace(key, self._own)
        try:
            return _tree(path, attributes | _IDMAP, self._namespaces[key])
        except OSError:
            if not attributes & _RDONLY:
                os.chown(path, self._own, self._own)
            return _tree(path, attributes)

    def close(self) -> None:
        for handle in self._namespaces.values():
            os.close(handle)


def _user_namespace(owner: tuple[int, int], own: int) -> int:
    """A descriptor of a user namespace that maps this owner (user, group) of files to the user `own`."""
    ready_reader, ready_writer = os.pipe()
    hold_reader, hold_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hold_writer)
            function("unshare", ctypes.c_int(_CLONE_NEWUSER))
            os.write(ready_writer, b"+")
            os.read(hold_reader, 1)  # blocks until this process or its parent is killed
        finally:
            os._exit(1)
    os.close(ready_writer)
    os.close(hold_reader)
    try:
        if not os.read(ready_reader, 1):
            raise PermissionError("no user namespaces")
        Path(f"/proc/{pid}/uid_map").write_text(f"{owner[0]} {own} 1\n")
        Path(f"/proc/{pid}/gid_map").write_text(f"{owner[1]} {own} 1\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_reader)
        os.close(hold_writer)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _tree(path: str, attributes: int, namespace: int = 0) -> int:
    """A detached copy of the mount at `path`, with the mounts below it."""
    flags = _CLONE_TREE | os.O_CLOEXEC | _AT_RECURSIVE
    tree = call(_OPEN_TREE, _AT_FDCWD, ctypes.c_char_p(os.fsencode(path)), flags)
    try:
        _set(tree, "", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes, namespace)
    except OSError:
        os.close(tree)
        raise
    return tree


def _set(tree: int, path: str, flags: int, attributes: int, namespace: int = 0) -> None:
    change = _Attributes(attributes, 0, 0, namespace)
    size = ctypes.sizeof(change)
    call(_MOUNT_SETATTR, tree, ctypes.c_char_p(os.fsencode(path)), flags, ctypes.byref(change), size)


def _attach(tree: int, path: str, new: str) -> None:
    """Puts a detached mount at `path` of the new root, and closes it."""
    try:
        target = new + path
        if not os.path.lexists(target):
            source = os.stat(f"/proc/self/fd/{tree}")
            if stat.S_ISDIR(source.st_mode):
                os.makedirs(target)
            else:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        call(
            _MOVE_MOUNT,
            tree,
            ctypes.c_char_p(b""),
            _AT_FDCWD,
            ctypes.c_char_p(os.fsencode(target)),
            _MOVE_EMPTY_PATH,
        )
    finally:
        os.close(tree)


def _cover(path: str, new: str) -> None:
    target = new + path
    if os.path.isdir(target):
        _mount("closed", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=0755,{_SMALL}")
    elif os.path.lexists(target) and not os.path.islink(target):
        _attach(_tree("/dev/null", _RDONLY), path, new)


def _make_devices(new: str) -> None:
    os.mkdir(f"{new}/dev")
    for path in devices():
        _attach(_tree(path, _NOSUID), path, new)
    os.mkdir(f"{new}/dev/shm")
    _mount("shm", f"{new}/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777,size=50%")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{new}/dev/{name}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    def text(value: str | None) -> ctypes.c_char_p:
        return ctypes.c_char_p(None if value is None else os.fsencode(value))

    function("mount", text(source), text(target), text(kind), ctypes.c_ulong(flags), text(options))
