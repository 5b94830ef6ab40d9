"""Credentials that were made are listed, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from dmsc.cli import app
from dmsc.state.state_folder import StateFolder


def test_a_credential_that_was_made_is_listed(tmp_path: Path) -> None:
    StateFolder(tmp_path).write_tokens()

    def dmsc(*words: str) -> str:
        done = CliRunner().invoke(app, ["credential", *words, "--state", str(tmp_path)])
        assert done.exit_code == 0, done.exception
        return done.stdout

    assert dmsc("gateway", "--cluster", "a").strip()
    dmsc("module", "--name", "my-idea", "--expires", "8h", "-o", str(tmp_path / "idea.cred"))
    listed = json.loads(dmsc("list", "--json"))
    assert [(entry["name"], entry["kind"]) for entry in listed] == [
        ("gateway-a", "gateway"),
        ("my-idea", "functional-module"),
    ]
    assert listed[0]["id"] in dmsc("list")
