"""Software of before, taken out of git's history; and what is said where that can't be."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.history import taken_out


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """Two commits of one file, and the first one's name."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet")
    for text in ("before", "today"):
        (root / "software.txt").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", text)
    return root, git(root, "rev-parse", "HEAD~1")


def test_a_commits_files_are_taken_out(repository: tuple[Path, str], tmp_path: Path) -> None:
    root, first = repository
    taken_out(first, tmp_path / "old", root)
    assert (tmp_path / "old" / "software.txt").read_text() == "before"
    taken_out("HEAD", tmp_path / "new", root)
    assert (tmp_path / "new" / "software.txt").read_text() == "today"


@pytest.mark.parametrize("name", ["0" * 40, "nobody", "--output=x", "HEAD:software.txt", ""])
def test_what_is_no_commit_is_said_in_a_line(repository: tuple[Path, str], tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit) as caught:
        taken_out(name, tmp_path / "old", repository[0])
    assert caught.value.code == (
        f"git does not have {name}: name a commit, a tag or a branch of this repository"
    )
    assert not (tmp_path / "old").exists()


def test_a_shallow_clone_is_told_to_fetch_the_rest(repository: tuple[Path, str], tmp_path: Path) -> None:
    root, first = repository
    git(tmp_path, "clone", "--quiet", "--depth", "1", root.as_uri(), "shallow")
    with pytest.raises(SystemExit, match=rf"shallow and does not have {first}: git fetch --unshallow$"):
        taken_out(first, tmp_path / "old", tmp_path / "shallow")


def test_a_folder_without_history_of_its_own_is_said(repository: tuple[Path, str], tmp_path: Path) -> None:
    unpacked = tmp_path / "unpacked"
    within = repository[0] / "unpacked"  # somebody else's history is there
    for folder in (unpacked, within):
        folder.mkdir()
        with pytest.raises(SystemExit, match=f"^{folder} is no clone of the repository"):
            taken_out("HEAD", tmp_path / "old", folder)


def test_a_machine_without_git_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^git is not installed"):
        taken_out("HEAD", tmp_path / "old")
