"""Does what its payload says, so that a test sees how the fork server treats its children."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main(payload: dict[str, Any], result: Path | None) -> int:
    action = payload["do"]
    if action == "look":
        assert result is not None
        result.write_text(json.dumps(_surroundings()))
    elif action == "costly":
        assert result is not None
        found = sys.modules.get("fork_children.costly")
        result.write_text(json.dumps({"imported_by": getattr(found, "IMPORTED_BY", None)}))
    elif action == "raise":
        raise ValueError("no such\nlayer")
    elif action == "abort":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif action == "exit":
        raise SystemExit(payload["code"])
    elif action == "wait":
        if payload.get("stubborn"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(payload["here"]).touch()
        while True:
            time.sleep(60)
    return int(payload.get("code", 0))


def _surroundings() -> dict[str, Any]:
    inherited = "torch" in sys.modules
    import torch

    return {
        "pid": os.getpid(),
        "inherited": inherited,
        "parent": os.getppid(),
        "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in _open()),
        "threads": torch.get_num_threads(),
        "sum": float(torch.ones(300, 300).matmul(torch.ones(300, 300)).sum()),
        "random": [random.random(), float(torch.rand(()))],
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "directory": os.getcwd(),
    }


def _open() -> list[int]:
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
