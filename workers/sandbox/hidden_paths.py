"""Hidden parts of a folder that is given to users' code: secrets that happen to be below it.

A folder of code is a working directory, and people keep more there: environments and version control (names
with a dot), another mesh's state folder, outputs of jobs. It is searched when a process is confined; folders
that were not searched are hidden too.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections import deque
from collections.abc import Collection, Iterator

from schemas.urls import RUNS

MOST_ENTRIES = 20_000
"""Most entries of a folder of code that are searched; that takes some 20 ms."""
MOST_CLOSED = 64
"""Most folders that are hidden one by one because they were not searched; if they are more, their topmost
parents are hidden."""
DEPTH = 2
"""Depth to which a folder that a job names, perhaps with large data, is searched for a state folder."""
STATE_MARKS = ("bus_token", "guard.json")
"""The root key of a mesh, and the keys of its auth callout: a folder with one of these is a mesh's state."""


def hidden_paths(folder: str, *, code: bool, visible: Collection[str] = ()) -> Iterator[str]:
    """Files and folders below `folder` that are hidden.

    Args:
        folder: An absolute, resolved path.
        code: Whether it is a folder of code. Else a job or the operator named it for its content, and parts
            that were not searched are shown.
        visible: Paths below it that are given and searched separately.
    """
    pending: deque[tuple[str, int]] = deque([(folder, 0)])
    searched = 0
    while pending and searched < MOST_ENTRIES:
        path, depth = pending.popleft()
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue
        searched += len(entries)
        for entry in entries:
            if entry.path in visible:
                continue
            if entry.name.startswith("."):
                if code or depth == 0:
                    yield entry.path
            elif (
                entry.name == RUNS and depth == 0
            ):  # all jobs' weights and checkpoints: each job gets its own
                yield entry.path
            elif _is_folder(entry):
                if is_state_folder(entry.path):
                    yield entry.path
                elif code or depth < DEPTH:
                    pending.append((entry.path, depth + 1))
    if code and pending:
        yield from _hide_unsearched(folder, [path for path, _ in pending])


def _hide_unsearched(folder: str, paths: list[str]) -> Iterator[str]:
    if len(paths) > MOST_CLOSED:
        start = folder.rstrip("/") + "/"
        paths = [start + path.removeprefix(start).partition("/")[0] for path in paths]
    hidden = tuple(dict.fromkeys(paths))
    some = ", ".join(hidden[:3]) + (f" and {len(hidden) - 3} more" if len(hidden) > 3 else "")
    print(
        f"users' code does not see {some}: {folder} has more than {MOST_ENTRIES:,} entries to look through;"
        " start the node in a smaller folder, or name one with --code",
        file=sys.stderr,
        flush=True,
    )
    yield from hidden


def is_state_folder(path: str) -> bool:
    """Whether the folder holds the keys of a mesh."""
    return any(os.path.lexists(f"{path}/{mark}") for mark in STATE_MARKS)


def holds_home(folder: str) -> bool:
    """Whether the folder is this user's home or a parent of it: being in it does not give it to user code."""
    homes = {os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir), os.path.realpath(os.path.expanduser("~"))}
    return any(home == folder or home.startswith(folder.rstrip("/") + "/") for home in homes if home != "/")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
