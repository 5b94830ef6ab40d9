"""The page writes a job's configuration as YAML that reads back as the same (`yaml.js`)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import entities.gateway.dashboard.assets as assets
from tests.builders.jobs import spec

SCRIPT = Path(assets.__file__).parent / "static" / "js" / "yaml.js"
ODD: dict[str, Any] = {
    "text": "two\nlines: # no comment",
    "words": ["yes", "fp32", "1.5", "- x", "null", "0x1F", "", "a b", "é", "~"],
    "nested": [{"a": 1, "b": [1, [2]]}, {"c": {}}, []],
    "small": [1e-05, 1e-08, -2.5e-09, 3],
    "flag": False,
}


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script by node")
@pytest.mark.parametrize("value", [ODD, spec().model_dump(mode="json", exclude_none=True)])
def test_it_reads_back_as_the_same(tmp_path: Path, value: dict[str, Any]) -> None:
    (tmp_path / "yaml.mjs").write_text(SCRIPT.read_text())
    run = "import {yaml} from './yaml.mjs'; process.stdout.write(yaml(JSON.parse(process.argv[1])))"
    command = ["node", "--input-type=module", "-e", run, json.dumps(value)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout) == value
