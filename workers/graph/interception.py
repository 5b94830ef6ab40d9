"""What torch's function modes do not see comes to the recorder here: calls of modules and of custom autograd
functions, and where the model's own code chooses the precision.

All three are patched on torch's classes while a recording runs. Other threads are passed on unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from workers.graph.model_graph import AutocastRegion


class CallRecorder(Protocol):
    """Gets the calls."""

    regions: list[AutocastRegion]

    def module_called(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """In place of a module's `__call__`."""

    def function_applied(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """In place of a custom autograd function's `apply`, which is `function`."""


@contextmanager
def intercepted(recorder: CallRecorder) -> Iterator[None]:
    """Within, this thread's calls and autocast regions come to `recorder`."""
    with _modules(recorder), _functions(recorder), _regions(recorder):
        yield


@contextmanager
def _modules(recorder: CallRecorder) -> Iterator[None]:
    original, thread = nn.Module.__call__, threading.get_ident()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(module, *args, **kwargs)
        return recorder.module_called(original, module, args, kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


@contextmanager
def _functions(recorder: CallRecorder) -> Iterator[None]:
    original: Any = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            return original.__func__(cls, *args, **kwargs)

        if threading.get_ident() != thread:
            return function(*args, **kwargs)
        if cls is CheckpointFunction:  # it saves memory, and computes what its function does
            run, _, *given = args
            return run(*given)
        function.__name__ = f"{cls.__name__}.apply"
        return recorder.function_applied(function, args, kwargs)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _regions(recorder: CallRecorder) -> Iterator[None]:
    """`autocast(x.device.type)` is about `meta` while a model is recorded, which torch refuses."""
    kind: Any = torch.autocast
    made, entered, left = kind.__init__, kind.__enter__, kind.__exit__
    thread = threading.get_ident()

    def make(
        region: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        own = device_type == "meta"
        made(region, "cpu" if own else device_type, dtype, enabled, cache_enabled)
        region.chosen = AutocastRegion(None if own else device_type, enabled, dtype)

    def enter(region: Any) -> Any:
        if threading.get_ident() == thread:  # a decorator's region was made before
            plain = AutocastRegion(region.device, region._enabled, region.fast_dtype)
            recorder.regions.append(getattr(region, "chosen", plain))
        return entered(region)

    def leave(region: Any, *error: Any) -> Any:
        if threading.get_ident() == thread:
            recorder.regions.pop()
        return left(region, *error)

    kind.__init__, kind.__enter__, kind.__exit__ = make, enter, leave
    try:
        yield
    finally:
        kind.__init__, kind.__enter__, kind.__exit__ = made, entered, left
