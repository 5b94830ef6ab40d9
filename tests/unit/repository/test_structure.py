"""The house stays one in which a stranger finds the room: sizes, walls, and one name for each thing."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from scripts.structure import Structure, circles, read_structure

ROOT = Path(__file__).resolve().parents[3]
MOST_LINES = 500
MOST_FILES = 14
FLAT = {"schemas"}
"""Whose files have the field's words for names, are public, and are found by them."""


@pytest.fixture(scope="module")
def structure() -> Structure:
    return read_structure()


def test_nothing_imports_what_imports_it(structure: Structure) -> None:
    assert circles(structure.imports) == []


@pytest.mark.parametrize("package", ["bus", "dmsc", "entities", "entities.gateway", "policies", "workers"])
def test_no_room_imports_one_that_imports_it(structure: Structure, package: str) -> None:
    assert circles(structure.rooms(package)) == []


def test_the_orchestrator_has_few_rooms_and_few_doors(structure: Structure) -> None:
    rooms = structure.rooms("entities.orchestrator")
    assert len(rooms) <= 18, sorted(rooms)
    assert sum(map(len, rooms.values())) <= 65, rooms


def test_a_package_holds_few_files(structure: Structure) -> None:
    full = {
        package: len(files)
        for package in structure.packages()
        if len(files := structure.files_in(package)) > MOST_FILES and package not in FLAT
    }
    assert full == {}


def test_every_package_says_what_it_is(structure: Structure) -> None:
    silent = [name for name in structure.packages() if not ast.get_docstring(structure.trees[name])]
    assert silent == []


def test_no_class_name_stands_twice_in_the_product(structure: Structure) -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, tree in structure.trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_no_file_is_longer_than_two_ideas() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in listed}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_times_are_their_owners_configuration(structure: Structure) -> None:
    """No constant of a module is a time, but those in `schemas` that two sides agree on."""
    found = [
        f"{name}.{target.id}"
        for name, tree in structure.trees.items()
        if not name.startswith("schemas.")
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp | ast.Tuple)
        for target in (each for targets in node.targets for each in ast.walk(targets))
        if isinstance(target, ast.Name) and re.search(r"(?<!PER)_(S|MS|US|NS)$", target.id)
    ]
    assert found == []


def test_no_line_is_kept_from_the_formatter() -> None:
    mark = "# fmt" + ":"
    found = subprocess.run(
        ["git", "grep", "-l", mark, "--", "*.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout == ""
