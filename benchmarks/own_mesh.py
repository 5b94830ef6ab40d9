"""A mesh for a benchmark that looks at it from outside, as a user would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mesh(folder: Path) -> Iterator[Path]:
    """A mesh of its own, on free ports, gone afterwards; its state folder."""
    state = folder / "state"
    command = [sys.executable, "-m", "dmsc"]
    options = ["--state", str(state), "--nats-port", "0", "--http-port", "0", "--slots", "3", "--detach"]
    subprocess.run(
        [*command, "up", "--allow-url", "*", *options], check=True, stdout=subprocess.DEVNULL, cwd=folder
    )
    try:
        yield state
    finally:
        subprocess.run(
            [*command, "down", "--state", str(state)], check=True, stdout=subprocess.DEVNULL, cwd=folder
        )
