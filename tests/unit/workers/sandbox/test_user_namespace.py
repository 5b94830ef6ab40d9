"""The process that holds a user namespace open ends with whoever made it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

DIES = """
import os, signal
from pathlib import Path
from workers.sandbox import mounts

def die(path, text):
    print(path.parts[2], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

Path.write_text = die
mounts._user_namespace((0, 0), 60000)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/user"), reason="no user namespaces here")
def test_it_ends_with_a_parent_that_is_killed_in_between() -> None:
    # both have standard output, which is read to its end: there is none before both have ended
    done = subprocess.run(
        [sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, check=False, timeout=PATIENCE_S
    )
    if done.returncode != -signal.SIGKILL:
        pytest.skip("user namespaces can not be made here")
    assert done.stdout.strip().isdigit(), "there was no such process"
