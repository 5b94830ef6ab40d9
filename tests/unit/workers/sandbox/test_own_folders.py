"""A confined process writes below its own scratch folder, whatever the process that forked it has set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from workers.sandbox.confinement import ConfinementMethod, works
from workers.sandbox.users import DEFAULT_RANGE

CONFINED = """
import json, os, sys, tempfile
from workers.sandbox.confinement import ConfinementMethod, Reach, confine

scratch, way, user = sys.argv[1:]
confine(Reach(scratch=scratch), ConfinementMethod(way), user=int(user))
with tempfile.NamedTemporaryFile() as file:
    print(json.dumps({"file": file.name, **os.environ}))
"""


@pytest.mark.parametrize("way", [ConfinementMethod.OWN_USER, ConfinementMethod.LANDLOCK])
def test_no_variable_names_a_folder_of_the_fork_server(tmp_path: Path, way: ConfinementMethod) -> None:
    if not works(way):
        pytest.skip(f"this machine can't confine anybody by {way}")
    ours = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR", "HOME", "XDG_CACHE_HOME"}
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, str(tmp_path / "scratch"), way, str(DEFAULT_RANGE[0])],
        env={**os.environ, **dict.fromkeys(ours, str(tmp_path))},
        stdout=subprocess.PIPE,
        check=True,
        timeout=PATIENCE_S,
    )
    found = json.loads(done.stdout)
    scratch = str(tmp_path / "scratch")
    assert found["file"].startswith(scratch)
    assert {name for name in ours & found.keys() if not found[name].startswith(scratch)} == set()
    assert not {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} & found.keys(), "torch finds one below TMPDIR"
