"""Stands in for torch in fork servers whose agent is tested: the import of the real one takes seconds of CPU.

What the fork server itself does with the real one is in `tests/integration/workers/test_fork_server.py`, and
in every test with a mesh.
"""

from __future__ import annotations

__version__ = "0+stand.in"
_threads = 0


class version:
    cuda = hip = None


def set_num_threads(count: int) -> None:
    global _threads
    _threads = count


def get_num_threads() -> int:
    return _threads


def seed() -> int:
    return 0
