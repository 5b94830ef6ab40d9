"""Temporary user ids: each belongs to one process and is free again after it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from dataclasses import dataclass

from schemas.errors import BadInput

DEFAULT_RANGE = (60578, 61183)
"""Ids that no people, system services or systemd's dynamic users have (systemd's UIDS-GIDS.md)."""


def parse_range(text: str) -> tuple[int, int]:
    """The range given as `--instance-users LO-HI`. Raises `BadInput`."""
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and 1000 <= int(low) <= int(high) < (1 << 32) - 2):
        raise BadInput(f"--instance-users {text}: write it as LO-HI, numbers of users from 1000 on")
    return int(low), int(high)


@dataclass(slots=True)
class Lease:
    """A user id that no other process has until `end`, or until the end of the process that took it."""

    user: int
    _mark: socket.socket

    def end(self) -> None:
        self._mark.close()


def lease(users: tuple[int, int]) -> Lease:
    """Takes a user id of that range that no process of this machine has.

    It is marked by an abstract Unix socket, which ends with its holder and leaves nothing behind.

    Raises:
        OSError: All ids are taken.
    """
    low, high = users
    count = high - low + 1
    first = random.SystemRandom().randrange(count)
    used = _used_ids()
    for number in range(count):
        user = low + (first + number) % count
        if user in used:
            continue
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0dmsc-user-{user}")
            return Lease(user, mark)
        except OSError:
            mark.close()
    raise OSError(0, f"all users from {low} to {high} are taken; give more by --instance-users")


def _used_ids() -> set[int]:
    ids = set()
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    ids.add(entry.stat().st_uid)
    return ids
