#!/usr/bin/env python3
"""Writes the hash-locked dependencies of the image, for `make lock`.

    python scripts/lock.py [--torch-wheel FILE ...]

From pyproject.toml (what runs the mesh, and the extras `otel` and `kubernetes`) to three files in `deploy/`.
Each entry has its version and the SHA-256 of every file that the index has of it:

    requirements.lock   everything but torch and what only its CUDA builds need
    torch.lock          torch; `--torch-wheel` adds the hash of a build from elsewhere, such as the CPU-only
                        one, and hashes of the same version that were added before stay
    torch-cuda.lock     what torch's CUDA builds need beside it; a CPU-only build needs none of it

pip-tools resolves them (the extra `lock`).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton)")
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>\S+)")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def wanted(root: Path = ROOT) -> list[str]:
    """The requirements that the image installs, as pyproject.toml has them."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["otel"], *extras["kubernetes"]]


def entries(text: str) -> dict[str, str]:
    """A lock file's entries by name, each as its lines stand there, comments left away."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        begins = ENTRY.match(line)
        if begins is not None:
            name = begins["name"]
            found[name] = line
        elif name and HASH.search(line):
            found[name] += f"\n{line}"
    return found


def resolve(requirements: list[str]) -> dict[str, str]:
    """All packages that these need, with hashes, for this machine's platform and Python."""
    with tempfile.TemporaryDirectory(prefix="dmsc-lock-") as folder:
        source, lock = Path(folder) / "in.txt", Path(folder) / "out.txt"
        source.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        options = ["--quiet", "--generate-hashes", "--strip-extras", "--allow-unsafe", "--no-annotate"]
        command = [
            sys.executable,
            "-m",
            "piptools",
            "compile",
            *options,
            "--output-file",
            str(lock),
            str(source),
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"lock: pip-tools could not resolve the dependencies: {done.stderr.strip()[-500:]}")
        return entries(lock.read_text(encoding="utf-8"))


def write(path: Path, about: str, found: dict[str, str]) -> None:
    lines = [
        f"# {about} Made by `make lock`; not to be edited.",
        *(found[name] for name in sorted(found)),
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def with_hashes(entry: str, more: list[str]) -> str:
    """The entry with hashes that it lacks."""
    lacking = [one for one in more if one not in entry]
    return " \\\n    ".join([entry, *lacking])


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the hash-locked dependencies of the image.")
    parser.add_argument(
        "--torch-wheel", type=Path, action="append", default=[], help="a build from elsewhere"
    )
    given = parser.parse_args()
    found = resolve([*wanted(), "setuptools>=77"])  # and what builds the product itself
    version = ENTRY.match(found["torch"])
    assert version is not None
    before = entries((DEPLOY / "torch.lock").read_text() if (DEPLOY / "torch.lock").exists() else "")
    known = HASH.findall(before["torch"]) if before.get("torch", "").startswith(version[0]) else []
    known += [
        f"--hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in given.torch_wheel
    ]
    torch = {"torch": with_hashes(found.pop("torch"), known)}
    cuda = {name: found.pop(name) for name in list(found) if CUDA.match(name)}
    write(DEPLOY / "requirements.lock", "The image's dependencies but torch.", found)
    write(
        DEPLOY / "torch.lock", "torch, as PyPI has it, and builds of the same version from elsewhere.", torch
    )
    write(DEPLOY / "torch-cuda.lock", "What torch's CUDA builds need beside it.", cuda)
    builds = len(HASH.findall(torch["torch"]))
    print(f"locked {len(found)} packages, {builds} builds of torch, {len(cuda)} packages of CUDA")


if __name__ == "__main__":
    main()
