"""Ends work on a thread for which nobody waits any more: a thread can't be cancelled, so its work asks."""

from __future__ import annotations

import threading
from contextvars import ContextVar

abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)
"""Set once nobody waits for the work of this context; None: it is never given up."""


class WorkAbandoned(Exception):
    """Nobody waits for the outcome."""


def stop_if_abandoned() -> None:
    """Ends work that nobody waits for. Whatever may be one of many steps of a long computation calls it.

    Raises:
        WorkAbandoned: it is.
    """
    over = abandoned.get()
    if over is not None and over.is_set():
        raise WorkAbandoned
