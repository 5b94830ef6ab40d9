"""`dmsc policy new` (issue: a template with its test): it works as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dmsc.commands.policies.policy import write_policy
from dmsc.process.policy_loading import load_policy
from schemas.errors import BadInput
from tests.integration.dmsc.command_line import environment
from tests.patience import PATIENCE_S


def test_a_new_policy_passes_its_own_test_and_loads(tmp_path: Path) -> None:
    file, test_file = write_policy("my-idea", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test_file.name],
        cwd=tmp_path,
        env=environment(PYTEST_ADDOPTS=""),  # those of this run are not its
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    policy = load_policy(str(file))
    assert (type(policy).__name__, policy.name) == ("MyIdea", "my-idea")


@pytest.mark.parametrize("name", ["1st", "a b", "", "class", "-", "a.b"])
def test_a_name_that_can_be_no_module_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a policy's name has letters"):
        write_policy(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("precious")
    with pytest.raises(BadInput, match="is there already"):
        write_policy("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
