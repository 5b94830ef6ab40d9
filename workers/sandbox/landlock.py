"""Landlock: a process gives up all files except those that it names, irreversibly.

In all versions it also prevents a process from tracing processes outside, and so from reading their memory
and environment. From the sixth version on it prevents signals to them and the use of their abstract Unix
sockets.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

from workers.sandbox.kernel import LINUX, call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FIRST = (1 << 13) - 1
_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_MAKE_DEVICES = 1 << 6 | 1 << 11
READ = _EXECUTE | _READ_FILE | _READ_DIR
LIST = _READ_DIR
USE = _READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL_DEVICE | _TRUNCATE
CHANGE = (_FIRST | _REFER | _TRUNCATE) & ~_MAKE_DEVICES

SCOPES_SIGNALS = 6
"""The first version that restricts signals and abstract Unix sockets."""
_SCOPES = 0b11


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """The version of the kernel's Landlock; 0: it has none."""
    if not LINUX:
        return 0
    try:
        return call(_CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(rules: Iterable[tuple[str, int]]) -> None:
    """Restricts this thread, and all that it starts, to files that these rules allow.

    Needs no_new_privs. Rules for missing paths and for symbolic links are ignored.

    Args:
        rules: (path, rights below it).

    Raises:
        OSError: The kernel has no Landlock, or refuses.
    """
    present = version()
    handled = _FIRST
    for first, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEVICE)):
        handled |= right if present >= first else 0
    ruleset = _Ruleset(handled, 0, _SCOPES if present >= SCOPES_SIGNALS else 0)
    size = 24 if present >= SCOPES_SIGNALS else 16 if present >= 4 else 8
    handle = call(_CREATE_RULESET, ctypes.byref(ruleset), size, 0)
    try:
        for path, rights in rules:
            _add(handle, path, rights & handled)
        call(_RESTRICT_SELF, handle, 0)
    finally:
        os.close(handle)


def _add(handle: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        mode = os.fstat(parent).st_mode
        if stat.S_ISLNK(mode):
            return
        rights &= ~0 if stat.S_ISDIR(mode) else _FILE
        if rights:
            call(_ADD_RULE, handle, _PATH_BENEATH, ctypes.byref(_Beneath(rights, parent)), 0)
    finally:
        os.close(parent)
