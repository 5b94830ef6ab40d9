"""A filter of system calls that no model needs and that attacks often use.

Above all it refuses Unix sockets: Landlock does not restrict those with a name in the file system, and a
container engine, a key agent or a session bus may listen on one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

from workers.sandbox.kernel import LINUX, PR_SET_SECCOMP, function

_MODE_FILTER = 2
# BPF: ld abs word, jeq, jge, jset, ret
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
# Offsets in struct seccomp_data; for an argument, that of its low word.
_NUMBER, _MACHINE, _FIRST, _SECOND = 0, 4, 16, 24
_X32 = 0x40000000
_INET, _INET6, _NETLINK = 2, 10, 16

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
}
_ONLY_ITSELF = {
    "prlimit64": (302, 261),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setaffinity": (203, 122),
}
"""Calls whose first argument is a process: they could starve or end another process of the same user."""
_NEVER_WITH: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "fcntl": (72, 25, (8, 10, 15)),
    "ioctl": (16, 29, (0x8901, 0x8902)),
}
"""Call → (numbers, refused second arguments): they set which process gets which signal when a file is ready.
Landlock before its sixth version allows any process of the same user, and the signal SIGKILL."""
_CLONE, _CLONE3 = (56, 220), (435, 435)
_NAMESPACES = 0x7E020000
"""All CLONE_NEW* flags of clone(2). clone3(2) has its flags in memory, which no filter can read; the C
library works without it."""
_SIGNALS = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
_SIGNALS_REFUSED = {"tkill": (200, 130), "pidfd_send_signal": (424, 424)}
_SOCKET = (41, 198)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def known() -> bool:
    """Whether there is a filter for this machine's architecture."""
    return LINUX and os.uname().machine in _MACHINES


def restrict(*, signals: bool) -> None:
    """Refuses those calls to this thread and all that it starts, from now on. Needs no_new_privs.

    Args:
        signals: Whether it may signal other processes, as far as other mechanisms allow it.

    Raises:
        OSError: The kernel has no filters, or refuses.
    """
    code = b"".join(struct.pack("<HBBI", *step) for step in _program(os.uname().machine, signals))
    program = _Program(len(code) // 8, code)
    function(
        "prctl",
        ctypes.c_int(PR_SET_SECCOMP),
        ctypes.c_ulong(_MODE_FILTER),
        ctypes.byref(program),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )


Step = tuple[int, int, int, int]
"""(code, steps to skip if true, if false, operand)."""


def _program(machine: str, signals: bool) -> Iterator[Step]:
    column = list(_MACHINES).index(machine)
    yield (_LOAD, 0, 0, _MACHINE)
    yield (_EQUAL, 1, 0, _MACHINES[machine])
    yield _refuse(errno.ENOSYS)
    yield (_LOAD, 0, 0, _NUMBER)
    if machine == "x86_64":
        yield (_AT_LEAST, 0, 1, _X32)
        yield _refuse(errno.ENOSYS)
    for numbers in (_REFUSED | ({} if signals else _SIGNALS_REFUSED)).values():
        yield (_EQUAL, 0, 1, numbers[column])
        yield _refuse(errno.EPERM)
    yield (_EQUAL, 0, 4, _CLONE[column])
    yield (_LOAD, 0, 0, _FIRST)
    yield (_ANY_OF, 0, 1, _NAMESPACES)
    yield _refuse(errno.EPERM)
    yield (_RETURN, 0, 0, _ALLOW)
    yield (_EQUAL, 0, 1, _CLONE3[column])
    yield _refuse(errno.ENOSYS)
    for x86, arm, refused in _NEVER_WITH.values():
        yield from _never((x86, arm)[column], _SECOND, refused)
    yield from _only(_SOCKET[column], _FIRST, (_INET, _INET6, _NETLINK), errno.EACCES)
    for numbers in _ONLY_ITSELF.values():
        yield from _only(numbers[column], _FIRST, (0,), errno.EPERM)
    for numbers in () if signals else _SIGNALS.values():
        yield from _only(numbers[column], _FIRST, (os.getpid(),), errno.EPERM)
    yield (_RETURN, 0, 0, _ALLOW)


def _only(number: int, offset: int, values: tuple[int, ...], error: int) -> Iterator[Step]:
    """Allows a call only with these values of one argument."""
    yield (_EQUAL, 0, len(values) + 3, number)
    yield (_LOAD, 0, 0, offset)
    for index, value in enumerate(values):
        yield (_EQUAL, len(values) - index, 0, value)
    yield _refuse(error)
    yield (_RETURN, 0, 0, _ALLOW)


def _never(number: int, offset: int, values: tuple[int, ...]) -> Iterator[Step]:
    """Refuses a call with these values of one argument."""
    yield (_EQUAL, 0, len(values) + 3, number)
    yield (_LOAD, 0, 0, offset)
    for index, value in enumerate(values):
        yield (_EQUAL, len(values) - index, 0, value)
    yield (_RETURN, 0, 0, _ALLOW)
    yield _refuse(errno.EPERM)


def _refuse(number: int) -> Step:
    return (_RETURN, 0, 0, _REFUSE | number)
