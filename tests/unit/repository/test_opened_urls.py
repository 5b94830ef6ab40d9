"""Who opens what jobs name: their own processes and nodes' workers, not the control plane (ADR-0040)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.files import artifacts
from schemas.errors import BadInput

ROOT = Path(__file__).resolve().parents[3]
OPENS = {"open_artifacts", "open_filesystem", "LocalArtifacts", "FileArtifacts", "fsspec", "secret_urls"}


def named_in(path: Path) -> set[str]:
    """Every name that a module imports, or takes from what it imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {part for alias in node.names for part in alias.name.split(".")}
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= set(node.module.split("."))
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


@pytest.mark.parametrize("package", ["entities", "policies", "dmsc"])
def test_no_part_of_the_control_plane_names_what_opens_a_url_of_a_job(package: str) -> None:
    modules = [*(ROOT / package).rglob("*.py")]
    assert len(modules) > 30
    opening = {
        str(path.relative_to(ROOT)): sorted(found) for path in modules if (found := named_in(path) & OPENS)
    }
    assert opening == {}


@pytest.fixture
def only_bus() -> Iterator[None]:
    artifacts.open_only_bus()
    yield
    artifacts._only_bus.clear()


@pytest.mark.usefixtures("only_bus")
@pytest.mark.parametrize("url", ["s3://bucket/x", "/etc", "file:///etc", "memory://x", "secret://u/n"])
def test_a_process_that_opens_only_the_bus_says_so_of_anything_else(url: str) -> None:
    for opens in (lambda: artifacts.open_artifacts(url, None), lambda: artifacts.open_filesystem(url)):
        with pytest.raises(BadInput, match="this process opens nothing but bus://") as caught:
            opens()
        assert "\n" not in caught.value.text
