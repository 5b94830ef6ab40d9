"""docs/draft-conformance.md: what is said to be done has its tests, and these are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "draft-conformance.md"
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[str, str, str]]:
    """What the draft says, what is here, and the tests, of each row of the page's tables."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    assert all(len(row) in (2, 3) for row in cells), [row[0] for row in cells if len(row) not in (2, 3)]
    return [(row[0], row[1], row[2] if len(row) == 3 else "") for row in cells]


def names_in(file: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, functions)}


def test_whatever_is_done_names_its_tests() -> None:
    assert [
        draft for draft, here, tests in rows() if here.startswith("Done") and not TEST.search(tests)
    ] == []


def test_the_tests_that_are_named_are_there() -> None:
    named = TEST.findall(PAGE.read_text())
    assert len(named) > 100
    missing = []
    for file, name in named:
        path = ROOT / "tests" / file
        if not path.is_file() or name not in names_in(path):
            missing.append(f"{file}::{name}")
    assert missing == []
