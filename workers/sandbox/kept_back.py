"""What a folder that is given to users' code does not show: secrets that lie below it by chance.

A folder of code is a working directory, and people keep more there: environments and version control (names
with a dot), another mesh's state folder, what jobs wrote. It is looked through when a process is confined;
what could not be looked through is kept back too.
"""

from __future__ import annotations

import os
import pwd
from collections import deque
from collections.abc import Collection, Iterator

from schemas.urls import RUNS

MOST_ENTRIES = 20_000
"""Of a folder of code are looked through; takes some 20 ms."""
MOST_CLOSED = 64
"""Folders that were not looked through are kept back one by one; if they are more, by their topmost ones."""
DEPTH = 2
"""How far below a folder that a job names, which may be data of any size, a state folder is looked for."""
STATE_MARKS = ("bus_token", "guard.json")
"""The root key of a mesh, and its guard's keys: a folder with one of these is a mesh's state."""


def kept_back(folder: str, *, code: bool, given: Collection[str] = ()) -> Iterator[str]:
    """Files and folders below `folder` that are not shown.

    Args:
        folder: absolute and resolved.
        code: whether it is one of code; else a job, or the operator, names it for what is in it, and what
            could not be looked through is shown.
        given: paths below it that are given themselves, and looked through by themselves.
    """
    left: deque[tuple[str, int]] = deque([(folder, 0)])
    looked = 0
    while left and looked < MOST_ENTRIES:
        path, depth = left.popleft()
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        looked += len(entries)
        for entry in entries:
            if entry.path in given:
                continue
            if entry.name.startswith("."):
                if code or depth == 0:
                    yield entry.path
            elif (
                entry.name == RUNS and depth == 0
            ):  # weights and checkpoints of all jobs: each is given its own
                yield entry.path
            elif _is_folder(entry):
                if is_state_folder(entry.path):
                    yield entry.path
                elif code or depth < DEPTH:
                    left.append((entry.path, depth + 1))
    if code and left:
        yield from _too_many(folder, [path for path, _ in left])


def _too_many(folder: str, paths: list[str]) -> Iterator[str]:
    if len(paths) > MOST_CLOSED:
        start = folder.rstrip("/") + "/"
        paths = [start + path.removeprefix(start).partition("/")[0] for path in paths]
    found = tuple(dict.fromkeys(paths))
    some = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    print(
        f"users' code does not see {some}: {folder} has more than {MOST_ENTRIES:,} entries to look through;"
        " start the node in a smaller folder, or name one with --code",
        flush=True,
    )
    yield from found


def is_state_folder(path: str) -> bool:
    """Whether a mesh keeps its keys there."""
    return any(os.path.lexists(f"{path}/{mark}") for mark in STATE_MARKS)


def holds_home(folder: str) -> bool:
    """Whether it is the home of whoever runs this, or one above it: too much to give away by being in it."""
    homes = {os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir), os.path.realpath(os.path.expanduser("~"))}
    return any(home == folder or home.startswith(folder.rstrip("/") + "/") for home in homes if home != "/")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
