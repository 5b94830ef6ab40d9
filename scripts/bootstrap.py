#!/usr/bin/env python3
"""Makes `.venv` and installs this checkout into it; does nothing when that is already so.

    python3 scripts/bootstrap.py           what runs the mesh
    python3 scripts/bootstrap.py --dev     and what checks it

Only the standard library and Python ≥ 3.11. Any path of the clone will do; runs at the same time wait
for one another (a lock beside `.venv`); an interrupted install is taken up again. Whether something
must be done is decided by a stamp in `.venv`: a hash of what the environment depends on.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):
    sys.exit(
        f"bootstrap: Python 3.11 or newer is needed, this is {sys.version.split()[0]} ({sys.executable})"
    )

import argparse
import contextlib
import fcntl
import hashlib
import json
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]


def fingerprint(root: Path) -> str:
    """Changes when the environment has to be made anew: dependencies, interpreter, or a moved clone."""
    inputs = (root / "pyproject.toml").read_bytes() + f"{sys.version_info[:2]} {root}".encode()
    return hashlib.sha256(inputs).hexdigest()


@contextlib.contextmanager
def locked(path: Path, say: TextIO = sys.stderr) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the kernel drops it with the process, however that ends."""
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("bootstrap: another run is installing here; waiting for it", file=say, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_current(stamp: Path, wanted: str, *, dev: bool) -> bool:
    """Whether the stamp says that this very thing is installed; the development one includes the plain."""
    try:
        known = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return False
    return bool(known.get("fingerprint") == wanted and (known.get("dev") or not dev))


def is_usable(folder: Path) -> bool:
    """Whether a `.venv` has pip, of this Python, with scripts that point here and not to an older place."""
    try:
        asked = subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "--version"], capture_output=True, text=True
        )
        points_here = str(folder) in (folder / "bin" / "pip").read_text()
    except OSError:
        return False
    version = f"(python {sys.version_info.major}.{sys.version_info.minor})"
    return asked.returncode == 0 and version in asked.stdout and points_here


def make_environment(folder: Path) -> None:
    """A working `.venv` with pip; one that was left half made is cleared first."""
    if is_usable(folder):
        return
    print(f"bootstrap: making {folder.name} with Python {sys.version.split()[0]}", flush=True)
    try:
        venv.create(folder, clear=folder.exists(), with_pip=True, symlinks=True)
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(
            f"bootstrap: could not make {folder}: {error}; "
            "on Debian and Ubuntu the venv module is a package of its own: apt install python3-venv"
        )


def install(python: Path, root: Path, *, dev: bool) -> None:
    """`pip install -e`: torch and all else come from whatever index the installer is configured for."""
    print("bootstrap: installing; the first time takes minutes, most of it is torch", flush=True)
    # what is imported is compiled then; of torch alone most never is
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    if not sys.stdout.isatty():
        command.append("--quiet")
    # the folder as working directory, not in the argument: an extra behind a path with spaces is misread
    done = subprocess.run([*command, "--editable", ".[dev]" if dev else "."], cwd=root)
    if done.returncode:
        sys.exit(f"bootstrap: pip ended with {done.returncode}, its reason stands above; run again to go on")


def main() -> None:
    """Brings `.venv` up to date and prints nothing if it is."""
    parser = argparse.ArgumentParser(description="Makes .venv and installs this checkout into it.")
    parser.add_argument("--dev", action="store_true", help="also what checks it: pytest, ruff, mypy …")
    dev = parser.parse_args().dev
    folder = ROOT / ".venv"
    python = folder / "bin" / "python"
    stamp = folder / ".dmsc-installed"
    wanted = fingerprint(ROOT)
    if is_current(stamp, wanted, dev=dev):
        return
    with locked(ROOT / ".venv.lock"):
        if is_current(stamp, wanted, dev=dev):  # the other run did it
            return
        make_environment(folder)
        stamp.unlink(missing_ok=True)
        install(python, ROOT, dev=dev)
        stamp.write_text(json.dumps({"fingerprint": wanted, "dev": dev}) + "\n")


if __name__ == "__main__":
    main()
