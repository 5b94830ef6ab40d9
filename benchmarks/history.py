"""Software of before, out of git's history: what benchmarks run beside today's."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "bb2bbd0daa665d0c2c33fab3ff00e58194352f42"
"""The last software before brokers, sealed secrets, confined code, and state folders as they are now."""


def taken_out(commit: str, folder: Path, root: Path = ROOT) -> None:
    """The files of a commit (or a tag, or a branch) into a folder that is not there yet.

    Raises:
        SystemExit: one line: there is no git, this is no clone, or it does not have the commit.
    """
    where = _git(root, "rev-parse", "--show-prefix")
    if where is None or where.strip():  # below somebody else's repository, its history is not ours
        raise SystemExit(
            f"{root} is no clone of the repository: software of before is in git's history alone"
        )
    name = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if name is None and (_git(root, "rev-parse", "--is-shallow-repository") or b"").strip() == b"true":
        raise SystemExit(
            f"this clone of git's history is shallow and does not have {commit}: git fetch --unshallow"
        )
    archive = None if name is None else _git(root, "archive", name.decode().strip())
    if archive is None:
        raise SystemExit(f"git does not have {commit}: name a commit, a tag or a branch of this repository")
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)


def _git(root: Path, *arguments: str) -> bytes | None:
    """What it prints; None: it refuses."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        raise SystemExit("git is not installed: software of before is in git's history alone") from None
    return None if done.returncode else done.stdout
