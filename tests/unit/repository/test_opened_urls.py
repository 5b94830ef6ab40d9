"""Who opens what jobs name: nodes, not gateways (ADR-0040)."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OPENS = {"open_artifacts", "open_filesystem", "LocalArtifacts", "FileArtifacts", "fsspec", "CheckpointStore"}


def named_in(path: Path) -> set[str]:
    """Every name that a module imports, or takes from what it imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def test_gateways_have_the_urls_of_a_job_opened_by_nodes() -> None:
    modules = [*(ROOT / "entities" / "gateway").rglob("*.py")]
    assert len(modules) > 40
    opening = {path.name: sorted(found) for path in modules if (found := named_in(path) & OPENS)}
    assert opening == {}
