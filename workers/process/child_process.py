"""A child of the fork server: what it does before, around and after the module that it was made for.

It ends with its parent, has its own log and randomness, confines itself, and only then imports the module.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from bus.parent_death import end_with_parent, prctl
from workers.process import prefork
from workers.sandbox import confinement
from workers.sandbox.confinement import ConfinementMethod, Reach
from workers.user_code import use_only

_PR_SET_NAME = 15


def run_child(order: dict[str, Any]) -> int:
    """In the new process: its own log, its own randomness, then the module's `main` for the exit code."""
    parent = os.getppid()
    _open_log(Path(order["log"]))
    prefork.title("dmsc", order.get("title") or order["id"], f"log={order['log']}")
    if sys.platform == "linux":
        prctl(_PR_SET_NAME, order["id"].encode()[:15])
    if order.get("priority"):
        os.setpriority(os.PRIO_PROCESS, 0, order["priority"])  # a confined process may not
    payload = _payload(order["payload"])
    code = {"code": order["code"], "closed_code": use_only(order["code"])} if order.get("code") else {}
    if order.get("reach") is not None and order["way"] != ConfinementMethod.NONE:
        confinement.close_descriptors()
        reach = Reach.of({**order["reach"], **code})
        confinement.confine(reach, ConfinementMethod(order["way"]), user=order.get("user"), parent=parent)
    faulthandler.enable()
    _reseed()
    if order.get("threads"):
        importlib.import_module("torch").set_num_threads(order["threads"])
    result = order.get("result")
    module = importlib.import_module(order["module"])
    return int(module.main(payload, Path(result) if result else None))


def run_afresh(parent: int) -> NoReturn:
    """Entry of a child that was not forked: its order arrives on standard input."""
    end_with_parent(parent, signal.SIGKILL)
    order = json.load(sys.stdin)
    prefork.end_with(lambda: run_child(order), order.get("module"))


def _payload(source: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(source, str):
        return source
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        os.unlink(source)
        payload: dict[str, Any] = json.load(file)
        return payload


def _open_log(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    prefork.redirect(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _reseed() -> None:
    """Forked children would otherwise all draw the server's random numbers."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
