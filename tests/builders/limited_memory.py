"""Work in a process that may have so much more memory than it begins with, and no more."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from schemas.errors import BadModel


def within(room_bytes: int, work: Callable[[], dict[str, str]]) -> dict[str, str] | None:
    """What a forked process returns that may have so much more memory; None: it was not enough."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            with open("/proc/self/status") as file:
                used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
            resource.setrlimit(resource.RLIMIT_DATA, (used + room_bytes, used + room_bytes))
            found: Any = work()
        except (MemoryError, RuntimeError, BadModel) as error:  # torch raises the second, a build the third
            found = None
            if "allocate" not in str(error):
                print(error, file=sys.stderr)
        with open(write, "w") as file:
            json.dump(found, file)
        os._exit(os.EX_OK)
    os.close(write)
    with open(read) as file:
        answer = file.read()
    os.wait()
    result: dict[str, str] | None = json.loads(answer) if answer else None
    return result
