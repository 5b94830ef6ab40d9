"""Numbers of users that exist only while a process has one."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from dataclasses import dataclass

from schemas.errors import BadInput

DEFAULT_RANGE = (60578, 61183)
"""Neither people, nor system services, nor systemd's dynamic users have these (systemd's UIDS-GIDS.md)."""


def parse_range(text: str) -> tuple[int, int]:
    """What `--instance-users LO-HI` says. Raises `BadInput`."""
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and 1000 <= int(low) <= int(high) < (1 << 32) - 2):
        raise BadInput(f"--instance-users {text}: write it as LO-HI, numbers of users from 1000 on")
    return int(low), int(high)


@dataclass(slots=True)
class Lease:
    """A user that is nobody else's until `end`, or the end of the process that has taken it."""

    user: int
    _mark: socket.socket

    def end(self) -> None:
        self._mark.close()


def lease(users: tuple[int, int]) -> Lease:
    """A user of that range whom no process of this machine has.

    The mark is an abstract Unix socket: it ends with its holder, and leaves nothing behind.

    Raises:
        OSError: all are taken.
    """
    low, high = users
    count = high - low + 1
    first = random.SystemRandom().randrange(count)
    taken = _users_at_work()
    for number in range(count):
        user = low + (first + number) % count
        if user in taken:
            continue
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0dmsc-user-{user}")
            return Lease(user, mark)
        except OSError:
            mark.close()
    raise OSError(0, f"all users from {low} to {high} are taken; give more by --instance-users")


def _users_at_work() -> set[int]:
    found = set()
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    found.add(entry.stat().st_uid)
    return found
