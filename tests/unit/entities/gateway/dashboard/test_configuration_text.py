"""The page's scripts: a configuration as YAML that reads back as the same, figures that are not finite."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import entities.gateway.dashboard.assets as assets
from tests.builders.jobs import spec

SCRIPTS = Path(assets.__file__).parent / "static" / "js"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script by node")
ODD: dict[str, Any] = {
    "text": "two\nlines: # no comment",
    "words": ["yes", "fp32", "1.5", "- x", "null", "0x1F", "", "a b", "é", "~"],
    "nested": [{"a": 1, "b": [1, [2]]}, {"c": {}}, []],
    "small": [1e-05, 1e-08, -2.5e-09, 3],
    "flag": False,
}


def called(folder: Path, script: str, call: str, argument: str) -> str:
    """What an expression of the page's script gives for `text`."""
    (folder / "script.mjs").write_text((SCRIPTS / script).read_text())
    run = f"import * as page from './script.mjs'; const text = process.argv[1]; process.stdout.write({call})"
    command = ["node", "--input-type=module", "-e", run, argument]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@needs_node
@pytest.mark.parametrize("value", [ODD, spec().model_dump(mode="json", exclude_none=True)])
def test_it_reads_back_as_the_same(tmp_path: Path, value: dict[str, Any]) -> None:
    written = called(tmp_path, "yaml.js", "page.yaml(JSON.parse(text))", json.dumps(value))
    assert yaml.safe_load(written) == value


@needs_node
def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    record = {"loss": [1.5, math.nan, math.inf, -math.inf], "name": 'a "NaN", \\', "reason": "-Infinity"}
    read = called(tmp_path, "door.js", "JSON.stringify(page.parsed(text))", json.dumps(record))
    assert json.loads(read) == record | {"loss": [1.5, None, None, None]}
