"""The process of a policy's model, `python -m policies.module.inference_process PARENT`.

It reads frames from standard input. The first frame names the policy's class; each further one holds the
model's inputs. Each is answered with (True, value) or (False, text). The model's printed output goes to
standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType
from typing import Any, BinaryIO

from bus.parent_death import end_with_parent

FRAME = struct.Struct(">Q")
"""Length of the pickle that follows, in bytes."""


def main(parent: int) -> None:
    """Answers until the parent closes this process's standard input or dies."""
    end_with_parent(parent, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # the model's printed output must not get between the frames
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the module handles a terminal's Ctrl-C
    questions: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    model: Callable[[Any], Any] | None = None
    while True:
        question = questions.get()
        try:
            if model is None:
                model = _make_model(*pickle.loads(question))
                answer = (True, None)
            else:
                answer = (True, model(pickle.loads(question)))
            data = pickle.dumps(answer, protocol=5)
        except Exception as error:  # any error of a user's model is reported, in one line
            data = pickle.dumps((False, f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]))
        _write(answers, data)


def _make_model(module_name: str, file: str | None, qualname: str) -> Callable[[Any], Any]:
    """The policy's model. The class is looked up, not unpickled, so that none of its code runs before."""
    if "<locals>" in qualname:
        raise ImportError(f"{qualname}: a policy with a model must stand at the top of its file")
    target: Any = _module(module_name, file)
    for name in qualname.split("."):
        target = getattr(target, name)
    model = target.model()
    if not callable(model):
        raise TypeError(
            f"{qualname}.model() returned {type(model).__name__}; return a function of the inputs"
        )
    return model  # type: ignore[no-any-return]  # callable was just checked


def _module(name: str, file: str | None) -> ModuleType:
    """Imports the policy's module by its name, or else from its file."""
    if name == "__main__":  # the file with which the module's process was started, unlike this one
        name = "dmsc_policy_main"
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    if file is None:
        raise ImportError(f"{name}: neither a module that can be imported nor a file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file}: Python can't load it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _read(questions: SimpleQueue[bytes]) -> None:
    """Reads frames on a thread, so that the parent's end is noticed while the model computes."""
    stdin = sys.stdin.buffer
    while True:
        head = stdin.read(FRAME.size)
        if len(head) < FRAME.size:
            os._exit(0)
        (size,) = FRAME.unpack(head)
        questions.put(stdin.read(size))


def _write(answers: BinaryIO, data: bytes) -> None:
    rest = memoryview(FRAME.pack(len(data)) + data)
    while rest:
        rest = rest[answers.write(rest) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
