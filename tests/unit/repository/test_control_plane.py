"""The control plane starts without torch (DESIGN: 80 MB a process), whoever imports what through whom."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]

REPORT = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps([name for name in ("torch", "pynvml", "transformers") if name in sys.modules]))
"""


def modules_below(package: str) -> list[str]:
    """All modules of a package, by their files: nothing is imported here."""
    names = [package]
    for found in pkgutil.walk_packages([str(ROOT / package)], prefix=f"{package}."):
        if not found.name.endswith(".__main__"):
            names.append(found.name)
    return names


@pytest.mark.parametrize("package", ["schemas", "bus", "entities", "policies", "dmsc"])
def test_no_module_of_the_control_plane_imports_torch(package: str) -> None:
    modules = modules_below(package)
    done = subprocess.run(
        [sys.executable, "-c", REPORT, json.dumps(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [], f"{package}: {modules}"
