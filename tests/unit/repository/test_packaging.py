"""The import names by the card, declared explicitly and ours alone (docs/adr/0001-import-names.md)."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
IMPORT_NAMES = ("bus", "dmsc", "entities", "policies", "schemas", "workers")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in_tree() -> list[str]:
    """Every folder below our import names that holds Python modules."""
    folders = {path.parent for name in IMPORT_NAMES for path in (ROOT / name).rglob("*.py")}
    return sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)


def test_the_explicit_package_list_is_the_tree() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"] == packages_in_tree()


def test_every_folder_of_modules_is_a_package() -> None:
    missing = [
        name for name in packages_in_tree() if not (ROOT / name.replace(".", "/") / "__init__.py").exists()
    ]
    assert missing == []


def test_every_import_name_says_that_it_is_typed() -> None:
    assert [name for name in IMPORT_NAMES if not (ROOT / name / "py.typed").exists()] == []


def test_the_names_belong_to_this_distribution_alone() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in IMPORT_NAMES:
        assert set(owners.get(name, [])) == {"dmsc"}, name


def test_every_runtime_dependency_is_installed_in_the_declared_version() -> None:
    from packaging.requirements import Requirement

    wrong = []
    for line in PROJECT["project"]["dependencies"]:
        requirement = Requirement(line)
        installed = importlib.metadata.version(requirement.name)
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{line}: {installed}")
    assert wrong == []
