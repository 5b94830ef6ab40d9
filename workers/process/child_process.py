"""A child of the fork server, from its start to the end of its module's `main`.

It ends with its parent, opens its own log, confines itself and seeds its random generators; only then it
imports the module.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import io
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from workers.sandbox import confinement
from workers.sandbox.confinement import ConfinementMethod, Reach

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_LINUX = sys.platform == "linux"


def run_child(order: dict[str, Any]) -> NoReturn:
    """Runs an order in the new process: log, confinement, new seeds, the module's `main`; never returns."""

    def work() -> int:
        parent = os.getppid()
        _open_log(Path(order["log"]))
        _name_process(order["id"])
        payload = _payload(order["payload"])
        if order.get("reach") is not None and order["way"] != ConfinementMethod.NONE:
            confinement.close_descriptors()
            reach = Reach.of(order["reach"])
            confinement.confine(reach, ConfinementMethod(order["way"]), user=order.get("user"), parent=parent)
        faulthandler.enable()
        _reseed()
        if order.get("threads"):
            importlib.import_module("torch").set_num_threads(order["threads"])
        result = order.get("result")
        module = importlib.import_module(order["module"])
        return int(module.main(payload, Path(result) if result else None))

    end_with(work, order.get("module"))


def end_with(work: Callable[[], int], name: str | None) -> NoReturn:
    """Ends this process with the exit code that `work` returns; logs an error that it raises."""
    code = 1
    try:
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        print(f"{name} failed: {type(error).__name__}: {text}", file=sys.stderr)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code & 0xFF)


def run_afresh(parent: int) -> NoReturn:
    """Entry point of a child that was not forked: reads its order from standard input."""
    die_with(parent)
    run_child(json.load(sys.stdin))


def die_with(parent: int) -> None:
    """Ends this process with its parent: by the kernel on Linux, else by a thread that checks each second."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _payload(source: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(source, str):
        return source
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
        os.unlink(source)
        payload: dict[str, Any] = json.load(file)
        return payload


def _open_log(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _name_process(name: str) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _reseed() -> None:
    """Seeds the generators anew: forked children would all draw the server's random numbers."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
