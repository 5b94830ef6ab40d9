"""A reader of files that is killed at its work."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def main(payload: dict[str, Any], result: Path | None) -> int:
    Path(payload["url"].removeprefix("file://"), "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return 0
