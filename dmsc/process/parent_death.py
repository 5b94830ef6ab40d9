"""A child that outlives its supervisor ends itself: nothing is orphaned, even after SIGKILL.

On Linux the kernel tells (PR_SET_PDEATHSIG); elsewhere a thread looks. Both are set up by the child,
so that the supervisor may start it in any way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_look_every_s = 0.5


def end_with_parent(parent: int) -> None:
    """SIGTERM this process once `parent` (its process id) is gone. Call it from the main thread."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        threading.Thread(target=_look, args=(parent,), name="parent-death", daemon=True).start()
    if os.getppid() != parent:  # it died before we asked
        os.kill(os.getpid(), signal.SIGTERM)


def _look(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_look_every_s)
    os.kill(os.getpid(), signal.SIGTERM)


def end_at_the_latest(after_s: float) -> None:
    """Leave hard in `after_s` seconds, whatever still hangs: who was told to stop must not stay."""

    def leave() -> None:
        print(f"dmsc: not stopped within {after_s:.0f} s, leaving", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(after_s, leave)
    timer.daemon = True
    timer.start()
