"""A user's policy by path: found, or one line that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dmsc.process.policy_loading import (
    BUILT_IN,
    DEFAULT_POLICIES,
    check_policies,
    chosen_policies,
    load_policy,
)
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
    with pytest.raises(
        BadInput, match=r"neither the name of a policy nor .*; did you mean path-faults or port-faults\?"
    ):
        load_policy("path-fault")
    with pytest.raises(BadInput, match="no such file"):
        load_policy(str(tmp_path / "none.py"))


def test_what_a_mesh_runs_unless_told_otherwise_comes_with_it() -> None:
    assert set(DEFAULT_POLICIES) <= set(BUILT_IN)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (("default",), DEFAULT_POLICIES),
        (("none",), ("none",)),
        (("path-faults",), ("path-faults",)),
        (("path-faults, link-trend", "path-faults"), ("path-faults", "link-trend")),
        (("default,path-faults", *DEFAULT_POLICIES), (*DEFAULT_POLICIES, "path-faults")),
        (("some.py:Mine", "default"), ("some.py:Mine", *DEFAULT_POLICIES)),
    ],
)
def test_chosen_by_words(words: tuple[str, ...], chosen: tuple[str, ...]) -> None:
    assert chosen_policies(words) == chosen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("path-fault",), "--policy path-fault: neither .*; did you mean path-faults?"),
        (("something",), "--policy something: neither .*; there are default, none, canary-judge, "),
        (("link-trend,",), "--policy '': neither "),
        (("default,none",), "--policy none starts no module: leave out default, or none"),
        (("none.py",), "--policy none.py: no such file"),
    ],
)
def test_chosen_by_words_that_name_nothing(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_policies(words)
