"""deploy/*.lock: what the image installs is what pyproject.toml asks for, and each file of it is known."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.script_module import script_module

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ("requirements.lock", "torch.lock", "torch-cuda.lock")


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    return script_module("lock")


@pytest.fixture(scope="module")
def locked(lock: ModuleType) -> dict[str, str]:
    """Name → entry, over all three files."""
    found: dict[str, str] = {}
    for name in LOCKS:
        for package, entry in lock.entries((ROOT / "deploy" / name).read_text()).items():
            assert package not in found, f"{package} is locked twice"
            found[canonicalize_name(package)] = entry
    return found


def test_the_lock_fits_what_is_asked_for(lock: ModuleType, locked: dict[str, str]) -> None:
    for text in [*lock.wanted(ROOT), "setuptools>=77"]:
        requirement = Requirement(text)
        entry = locked.get(canonicalize_name(requirement.name))
        assert entry is not None, f"{requirement.name} is not locked: make lock"
        version = lock.ENTRY.match(entry)["version"]
        assert requirement.specifier.contains(version), f"{requirement} is locked as {version}: make lock"


def test_every_entry_names_the_files_that_it_may_be(lock: ModuleType, locked: dict[str, str]) -> None:
    assert len(locked) > 50
    assert not [name for name, entry in locked.items() if not lock.HASH.search(entry)]
    assert set(lock.entries((ROOT / "deploy" / "torch.lock").read_text())) == {"torch"}


def test_the_image_installs_nothing_else() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    installs = [
        part for line in lines if not line.startswith("#") for part in line.split("&&") if " install " in part
    ]
    pip = [part for part in installs if "pip install" in part]
    *locked, product = pip
    assert all("--require-hashes" in part for part in locked)
    assert all(any(name in part for part in locked) for name in LOCKS)
    assert all("--no-deps" in part for part in pip)
    assert "--no-build-isolation" in product
