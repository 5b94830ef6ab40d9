"""Who displaces whom from a core: the control plane displaces nobody (ADR-0068).

Linux lets a thread that wakes up displace the one that runs, unless it is of the class SCHED_BATCH: then it
waits until a core is free, or a time slice ends. Messages wake services all the time, and each wake-up costs
whoever computes more than it saves the message. Both classes get equal shares.

A thread inherits the class of the one that starts it. A class that an operator gave (idle, real-time) stays.
Where there are no such classes, or they may not be changed, all threads are alike.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


def displace_nobody() -> bool:
    """This thread, and all that it starts from now on, displaces nobody.

    Returns:
        Whether that is new.
    """
    return sys.platform == "linux" and _changed(os.SCHED_OTHER, os.SCHED_BATCH)


def displace_others() -> None:
    """This thread, and all that it starts from now on, is as others: it takes back `displace_nobody`."""
    if sys.platform == "linux":
        _changed(os.SCHED_BATCH, os.SCHED_OTHER)


@contextlib.contextmanager
def displacing_nobody() -> Iterator[None]:
    """What is started within displaces nobody; this thread is as before afterwards."""
    changed = displace_nobody()
    try:
        yield
    finally:
        if changed:
            displace_others()


def _changed(before: int, after: int) -> bool:
    try:
        if os.sched_getscheduler(0) != before:
            return False
        os.sched_setscheduler(0, after, os.sched_param(0))
    except OSError:  # forbidden
        return False
    return True
