"""What a person sees while a mesh starts: lines to keep, and on a terminal what is still waited for."""

from __future__ import annotations

import contextlib
import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from schemas.plain_text import plain


class StartingView:
    """`say` prints a line; `progress` keeps one moving line on a terminal until `close`. All on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a file on a full disk, a terminal that is gone
            text = plain(text, keep="\n")
            if self._status is not None:
                self._console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """Show what is waited for, on a terminal only."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        shown = escape(plain(text))
        self._status.update(f"starting ({time.monotonic() - self._began:.0f} s)  [dim]{shown}[/]")

    def close(self) -> None:
        """Take the moving line away; twice is fine."""
        if self._status is not None:
            self._status.stop()
            self._status = None
