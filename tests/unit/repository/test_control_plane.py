"""The control plane starts without torch (DESIGN: 80 MB a process), whoever imports what through whom."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]

REPORT = """
import importlib, json, sys
for package, names in json.loads(sys.argv[1]).items():
    for name in names:
        importlib.import_module(name)
    heavy = [name for name in ("torch", "pynvml", "transformers") if name in sys.modules]
    print(json.dumps([package, heavy]), flush=True)
"""
PACKAGES = ("schemas", "bus", "entities", "policies", "dmsc")
"""Each imports those before it, so that one process will do: it says after which package what was there."""


def modules_below(package: str) -> list[str]:
    """All modules of a package, by their files: nothing is imported here."""
    names = [package]
    for found in pkgutil.walk_packages([str(ROOT / package)], prefix=f"{package}."):
        if not found.name.endswith(".__main__"):
            names.append(found.name)
    return names


def test_no_module_of_the_control_plane_imports_torch() -> None:
    modules = {package: modules_below(package) for package in PACKAGES}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[name, []] for name in PACKAGES]
