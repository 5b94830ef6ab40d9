"""What others' code left goes, however deep it lies, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from bus.files.removal import remove_folder

DEEPER_THAN_PYTHON = 3_000


def nested(folder: Path, levels: int) -> None:
    """Folders in one another, the last one with a file; made from within, as their path is too long."""
    before = os.getcwd()
    try:
        os.chdir(folder)
        for _ in range(levels):
            os.mkdir("d")
            os.chdir("d")
        Path("file").write_text("x")
    finally:
        os.chdir(before)


def test_folders_go_however_deep_they_lie(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    nested(folder, DEEPER_THAN_PYTHON)
    (folder / "beside").mkdir()
    (folder / "beside" / "file").write_text("x")
    assert remove_folder(folder)
    assert list(tmp_path.iterdir()) == []
    assert remove_folder(folder), "it is gone already"


def test_read_only_folders_go_too(tmp_path: Path) -> None:
    inner = tmp_path / "theirs" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").write_text("x")
    for path in (inner, *inner.parents[:2]):
        path.chmod(0o555)
    assert remove_folder("theirs", dir_fd=os.open(tmp_path, os.O_RDONLY))
    assert list(tmp_path.iterdir()) == []


def test_no_link_is_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "link").symlink_to(precious)
    assert remove_folder(folder)
    (tmp_path / "link").symlink_to(precious)
    assert not remove_folder(tmp_path / "link"), "a link is no folder"
    assert (precious / "file").exists()
