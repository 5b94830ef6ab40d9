"""System calls for which Python has no function."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_DUMPABLE, PR_SET_SECCOMP = 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITY_VERSION = 0x20080522
_CAPSET = {"x86_64": 126, "aarch64": 91}
_LAST_CAPABILITY = 63


def call(number: int, *arguments: Any) -> int:
    """Makes the system call of this number; integers are passed as longs. Raises `OSError`."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *values))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def function(name: str, *arguments: Any) -> int:
    """Calls the C library's function of this name. Raises `OSError`."""
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def prctl(option: int, argument: int) -> None:
    """Calls prctl(2) with one argument. Raises `OSError`."""
    values = [ctypes.c_ulong(value) for value in (argument, 0, 0, 0)]
    function("prctl", ctypes.c_int(option), *values)


def drop_capabilities() -> None:
    """Drops all capabilities of root, so that no executed program gets one back either."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL:  # this kernel has fewer capabilities
                raise
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    call(_CAPSET[os.uname().machine], ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def keep_private() -> None:
    """Prevents other processes of this user from reading this one's memory or attaching to it."""
    if LINUX:
        prctl(PR_SET_DUMPABLE, 0)
