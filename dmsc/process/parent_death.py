"""Ends a child process when its supervisor dies, so that none is orphaned, even after a SIGKILL.

On Linux the kernel sends a signal (PR_SET_PDEATHSIG). On other systems a thread polls the parent's process
id. The child sets up both itself, so that the supervisor may start it in any way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_poll_interval_s = 0.5


def end_with_parent(parent: int) -> None:
    """Send this process SIGTERM when the process `parent` has died. Call it from the main thread."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent-death", daemon=True).start()
    if os.getppid() != parent:  # the parent died before the signal was set up
        os.kill(os.getpid(), signal.SIGTERM)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_poll_interval_s)
    os.kill(os.getpid(), signal.SIGTERM)


def end_at_the_latest(after_s: float) -> None:
    """Exit in `after_s` seconds even if something hangs, because a process that was told to stop must end."""

    def leave() -> None:
        print(f"dmsc: not stopped within {after_s:.0f} s, leaving", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(after_s, leave)
    timer.daemon = True
    timer.start()
