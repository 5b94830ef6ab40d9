"""Code of users, as a node has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def user_module(folder: Path, name: str, source: str) -> Iterator[None]:
    """A module in this node's folder of code, until the end of the block."""
    (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DMSC_CODE_PATH", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        yield
    sys.modules.pop(name, None)
