"""What a person sees while a mesh starts: permanent lines, and on a terminal one line of progress."""

from __future__ import annotations

import contextlib
import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from schemas.plain_text import plain


class StartingView:
    """Shows the start of a mesh on stderr.

    `say` prints a line. `progress` updates one moving line, on a terminal only, until `close`.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk, or a closed terminal
            text = plain(text, keep="\n")
            if self._status is not None:
                self._console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def progress(self, text: str) -> None:
        """Show what the mesh waits for, on a terminal only."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        shown = escape(plain(text))
        self._status.update(f"starting ({time.monotonic() - self._began:.0f} s)  [dim]{shown}[/]")

    def close(self) -> None:
        """Remove the moving line. Closing twice is fine."""
        if self._status is not None:
            self._status.stop()
            self._status = None
