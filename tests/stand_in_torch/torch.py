"""Stands in for torch where a fork server is tested and not what runs in it: the real import takes seconds.

On `PYTHONPATH` it comes before the installed one. With the real one there are tests beside these, in
`test_fork_server.py` and `test_cluster.py`, and all that have a mesh.
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
