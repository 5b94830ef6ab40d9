"""A user's policy by path: found, or one line that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.process.policy_loading import BUILT_IN, load_policy
from schemas.errors import BadInput

ONE = (
    "from dmsc import Policy\nclass Mine(Policy):\n    name = 'mine'\n    def decide(self, view, now): ...\n"
)


def write(folder: Path, text: str) -> str:
    path = folder / "my_policy.py"
    path.write_text(text)
    return str(path)


def test_the_one_class_of_a_file(tmp_path: Path) -> None:
    assert load_policy(write(tmp_path, ONE)).name == "mine"


def test_one_of_several_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, ONE + ONE.partition("\n")[2].replace("Mine", "Other").replace("mine", "other"))
    with pytest.raises(BadInput, match=r"has Mine, Other; choose one with .*my_policy\.py:Mine"):
        load_policy(path)
    assert load_policy(path + ":Other").name == "other"
    with pytest.raises(BadInput, match="no class Third"):
        load_policy(path + ":Third")


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name: str) -> None:
    assert load_policy(name).name == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", "no class derived from policies.Policy"),
        ("def (:\n", r"my_policy\.py:1: invalid syntax"),
        ("\nimport no_such_module_at_all\n", r"ModuleNotFoundError.*\(line 2\)"),
        (ONE + "    def __init__(self): raise KeyError('x')\n", r"Mine\(\) failed: KeyError"),
        (ONE + "    def on_nothing(self, m, at): ...\n", "on_nothing: no such event"),
    ],
)
def test_a_file_that_does_not_load(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        load_policy(write(tmp_path, text))


def test_neither_name_nor_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither an entity or policy"):
        load_policy("gatway")
    with pytest.raises(BadInput, match="no such file"):
        load_policy(str(tmp_path / "none.py"))
