"""What a folder that is given to users' code does not show."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.sandbox import hidden_paths as module
from workers.sandbox.hidden_paths import hidden_paths, holds_home


def tree(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    return str(folder)


def found(folder: str, *, code: bool = True, visible: set[str] | None = None) -> set[str]:
    return {
        path.removeprefix(f"{folder}/") for path in hidden_paths(folder, code=code, visible=visible or set())
    }


def test_what_has_a_dot_and_what_is_a_meshs_state_at_any_depth(tmp_path: Path) -> None:
    names = (
        "model.py",
        ".env",
        "shop/api/.env",
        "shop/api/main.py",
        "a/b/c/blue/guard.json",
        "red/bus_token",
    )
    assert found(tree(tmp_path, *names)) == {".env", "shop/api/.env", "a/b/c/blue", "red"}


def test_what_is_visible_itself_is_not_hidden_nor_looked_through(tmp_path: Path) -> None:
    folder = tree(tmp_path, "venv/lib/.hidden", ".venv/lib/python", "model.py")
    assert found(folder, visible={f"{folder}/venv", f"{folder}/.venv"}) == set()


def test_of_a_named_folder_all_is_shown_but_states_and_what_has_a_dot_in_it(tmp_path: Path) -> None:
    folder = tree(tmp_path, ".state", "data/.part", "data/x/blue/bus_token", "far/x/y/z/bus_token")
    assert found(folder, code=False) == {".state", "data/x/blue"}


@pytest.mark.parametrize("code", [True, False])
def test_what_jobs_wrote_is_given_by_name_alone(tmp_path: Path, code: bool) -> None:
    folder = tree(tmp_path, "runs/j1/weights/model.safetensors", "model.py", "data/runs/words")
    assert found(folder, code=code) == {"runs"}


def test_what_was_not_looked_through_is_hidden_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 3)
    folder = tree(tmp_path, "model.py", "a/one", "b/two")
    assert found(folder) == {"a", "b"}
    assert "users' code does not see" in (said := capsys.readouterr().err)
    assert "has more than 3 entries" in said
    assert found(folder, code=False) == set()


def test_many_folders_are_hidden_by_their_topmost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_ENTRIES", 5)
    folder = tree(tmp_path, *(f"data/{number}/x" for number in range(module.MOST_CLOSED + 1)))
    assert found(folder) == {"data"}


def test_a_home_is_no_folder_of_code_by_being_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "project").mkdir(parents=True)
    assert holds_home(str(tmp_path))
    assert holds_home(str(tmp_path / "home"))
    assert not holds_home(str(tmp_path / "home" / "project"))
    assert not holds_home(str(tmp_path / "homework"))
