"""The page's scripts: a configuration as YAML that reads back, figures that are not finite, folded arrays."""

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


@needs_node
def test_the_jobs_of_an_array_are_one_line_until_it_is_opened(tmp_path: Path) -> None:
    states = {0: "running", 1: "failed", 2: "queued"}
    members = [{"job": f"r1a2b3c_{number}", "state": states.get(number, "done")} for number in range(1000)]
    jobs = [{"job": "j000001", "state": "running"}, *reversed(members), {"job": "j000002", "state": "done"}]
    calls = (
        "page.folded(jobs, new Set()).map((line) => line.key)",
        "page.folded(jobs, new Set(['r1a2b3c'])).map((line) => line.key)",
        "page.counts(jobs)",
        "page.stateOfAll(page.folded(jobs, new Set())[1].jobs)",
        "['widths-007', 'a-b-1', 'plain'].map(page.nameOf)",
    )
    call = f"JSON.stringify((() => {{ const jobs = JSON.parse(text); return [{', '.join(calls)}]; }})())"
    folded, opened, counts, state, names = json.loads(called(tmp_path, "arrays.js", call, json.dumps(jobs)))
    assert folded == ["j000001", "r1a2b3c", "j000002"]
    assert opened[:5] == ["j000001", "r1a2b3c", "r1a2b3c_0", "r1a2b3c_2", "r1a2b3c_1"], (
        "what is at work first"
    )
    assert len(opened) == 3 + 100
    assert (counts, state) == ("2 running, 1 queued, 1 failed, 998 done", "running")
    assert names == ["widths", "a-b", "plain"]
