"""User code by module path: what can go wrong with it, and the digest by which nodes compare theirs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import BadModel
from workers.user_code import CODE_PATH, code_digest, load

NAMES = ("mine", "helper", "package", "unrelated", "broken", "absent_import")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a user's module, another that it imports, and one that it does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(
        "import functools\nimport torch\nimport helper\nfrom json import dumps\n"
        "partial = functools.partial(dumps)\n"
        "def build(): return 1\nsize = 3\n"
    )
    (tmp_path / "helper.py").write_text("width = 8\n")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "absent_import.py").write_text("import no_such_library\n")
    package = tmp_path / "package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("from package.deep.model import build\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "model.py").write_text("def build(): return 2\n")
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in NAMES:
            del sys.modules[name]


def test_factories_load_from_the_working_directory_and_the_code_path(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load("mine:build")() == 1
    assert load("package.deep.model:build")() == 2
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move(str(folder / "mine.py"), elsewhere)
    shutil.move(str(folder / "helper.py"), elsewhere)
    forget()
    with pytest.raises(BadModel, match="no module 'mine'"):
        load("mine:build")
    monkeypatch.setenv(CODE_PATH, str(elsewhere))
    assert load("mine:build")() == 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("nowhere:build", "there is no module 'nowhere' here; put it into the working directory"),
        ("package.other:build", "there is no module 'package.other' here"),
        ("mine:missing", "has no 'missing'"),
        ("mine:size", "size is a int, not a function or class"),
        ("mine:torch", "torch is a module, not a function or class"),
        ("mine:dumps", "it is imported there, from json; name a function or class of your own"),
        ("mine:partial", "it is imported there, from json; name a function or class of your own"),
        ("numpy:load", "which is no folder of users' code; name it with --code"),
        ("subprocess:run", "subprocess is a module of Python itself"),
        ("broken:f", "SyntaxError: invalid syntax (broken.py:1)"),
        ("absent_import:f", "No module named 'no_such_library' (absent_import.py:1)"),
    ],
)
def test_what_is_wrong_is_one_line(factory: str, text: str) -> None:
    with pytest.raises(BadModel) as caught:
        load(factory)
    assert text in caught.value.text
    assert "\n" not in caught.value.text


def test_the_digest_follows_the_code_and_all_of_the_users_modules_that_it_imports(folder: Path) -> None:
    before = code_digest("mine:build")
    (folder / "unrelated.py").write_text("x = 2\n")
    assert code_digest("mine:build") == before
    (folder / "helper.py").write_text("width = 9\n")
    changed = code_digest("mine:build")
    assert changed != before
    (folder / "mine.py").write_text("import helper\n\ndef build(): return 5\n")
    assert code_digest("mine:build") not in {before, changed}


def test_the_digest_of_a_package_covers_all_of_its_files(folder: Path) -> None:
    before = code_digest("package:build")
    assert code_digest("package.deep.model:build") == before
    (folder / "package" / "deep" / "more.py").write_text("")
    assert code_digest("package:build") != before


def test_the_digest_does_not_depend_on_the_place(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code_digest("mine:build", "package:build")
    copy = tmp_path_factory.mktemp("copy") / "code"
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    forget()
    assert code_digest("package:build", "mine:build") == before


@pytest.mark.usefixtures("folder")
def test_every_factory_counts_and_a_missing_one_is_refused() -> None:
    assert code_digest("mine:build") != code_digest("mine:build", "unrelated:loss")
    assert code_digest("workers.models.gpt:byte_gpt") != code_digest("torch.nn:MSELoss")
    with pytest.raises(BadModel, match="no module 'nowhere'"):
        code_digest("nowhere:build")
