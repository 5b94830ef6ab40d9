"""The prefork server of `dmsc up`: whether there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import os
from dmsc.launch.prefork_server import running_prefork_server
with running_prefork_server() as server:
    print(server is not None, os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")
@pytest.mark.parametrize("given", [None, "2"])
def test_what_a_mesh_imports_starts_no_thread(given: str | None) -> None:
    """With threads there is no fork: each child is a new interpreter. `OMP_NUM_THREADS` would hide that."""
    pools = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    left = {key: value for key, value in os.environ.items() if key not in pools}
    if given is not None:
        left["OPENBLAS_NUM_THREADS"] = given
    done = subprocess.run([sys.executable, "-c", START], env=left, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(given)]
