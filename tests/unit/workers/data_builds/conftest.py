"""Builds in folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from schemas.data_set.build_file import DataBuildSpec
from tests.builders.data_sets import LocalBuild
from workers.data_builds.stores import FolderUnitStore


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., LocalBuild]:
    """(fields of a build's file, how it is run) → the build, done."""
    numbers = iter(range(1000))

    def run(run: Mapping[str, Any] = {}, **fields: Any) -> LocalBuild:
        spec = DataBuildSpec.model_validate({"name": "corpus", **fields})
        return LocalBuild(FolderUnitStore(tmp_path / f"objects-{next(numbers)}"), spec, **run)

    return run
