"""Temporary files of a node that was killed go with the next agent on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from entities.cluster.temporary_folder import TemporaryFolder, sweep
from tests.patience import PATIENCE_S

HOLD = """
import sys
from entities.cluster.temporary_folder import TemporaryFolder
held = TemporaryFolder()
(held.path / "half a checkpoint").write_bytes(b"x")
print(held.path, flush=True)
sys.stdin.read()
"""


def age(folder: Path) -> None:
    then = time.time() - 120.0
    os.utime(folder, (then, then))


def test_a_folder_goes_when_its_owner_is_dead_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert (folder / "half a checkpoint").exists()
    age(folder)
    assert sweep(tmp_path) == []
    owner.kill()
    owner.communicate(timeout=PATIENCE_S)
    (tmp_path / "dmsc-node-of-another-version").mkdir()
    age(tmp_path / "dmsc-node-of-another-version")
    mine = TemporaryFolder()
    assert not folder.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [mine.path.name, "dmsc-node-of-another-version"]
    )
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_one_that_is_just_being_made_is_left_alone(tmp_path: Path) -> None:
    young = tmp_path / "dmsc-node-young"
    young.mkdir(mode=0o700)
    (young / ".lock").touch()
    assert sweep(tmp_path) == []
    age(young)
    assert sweep(tmp_path) == [young]


def test_no_link_is_followed_and_no_strangers_folder_touched(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    linked, open_to_all, link = (tmp_path / f"dmsc-node-{name}" for name in ("linked", "open", "link"))
    linked.mkdir(mode=0o700)
    (linked / ".lock").symlink_to(precious)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / ".lock").touch()
    link.symlink_to(tmp_path)
    (tmp_path / ".lock").touch()
    for folder in (linked, open_to_all):
        age(folder)
    then = time.time() - 120.0
    os.utime(link, (then, then), follow_symlinks=False)
    assert sweep(tmp_path) == []
    assert precious.read_text() == "keep"
