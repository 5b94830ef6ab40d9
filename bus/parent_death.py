"""The end of a process with its parent, however the parent dies.

Importing this module takes no time worth counting: prefork servers and models' processes need it first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal when the process `parent` has died. Call it from the main thread.

    On Linux the kernel sends it (PR_SET_PDEATHSIG). On other systems a thread polls the parent's process id.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform == "linux":
        if not prctl(PR_SET_PDEATHSIG, number):
            raise OSError(ctypes.get_errno(), "no signal at the parent's death (PR_SET_PDEATHSIG)")
    else:
        threading.Thread(target=_watch, args=(parent, number), name="parent-death", daemon=True).start()
    if os.getppid() != parent:  # the parent died before the signal was set up
        os.kill(os.getpid(), number)


def prctl(option: int, value: int | bytes) -> bool:
    """Call Linux's `prctl`; return whether that worked."""
    arguments = (value if isinstance(value, bytes) else ctypes.c_ulong(value), *(ctypes.c_ulong(0),) * 3)
    return bool(ctypes.CDLL(None, use_errno=True).prctl(option, *arguments) == 0)


def _watch(parent: int, number: int, poll_s: float = 0.5) -> None:
    while os.getppid() == parent:
        time.sleep(poll_s)
    os.kill(os.getpid(), number)
