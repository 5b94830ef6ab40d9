"""Functions of a notebook become files: by source with what they use, else pickled; a new process tries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = """
import json, math, functools
import math as m
from collections import OrderedDict
from pathlib import Path
import sys
sys.path.insert(0, {folder!r})
import beside
from beside import helper
from dmsc.authoring.functions import as_files
from dmsc.authoring.code_folder import pack
from schemas.errors import DmscError

WIDTH = 3
SIZES = [1, {{"a": (2, 3)}}]
HANDLE = Path("/nowhere")

class Base:
    scale = 2

class Layer(Base):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.width = width * Base.scale

def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)

def sound(extra=0):
    local = OrderedDict(a=Layer().width)
    return [local["a"], m.floor(2.5), SIZES[1]["a"][1], helper(1), beside.constant, even(4), extra]

def uses_handle(): return str(HANDLE)

def around(k):
    def inside(): return k
    return inside

class Items:
    def __len__(self): return 2
    def __getitem__(self, index): return {{"x": index}}

objects = {objects}
try:
    code = as_files(objects, {way!r})
    pack(code.files, "it")
    found = {{"names": code.names, "files": {{n: d.decode("latin-1") for n, d in code.files.items()}},
             "python": code.python, "requirements": code.requirements}}
except DmscError as error:
    found = {{"error": error.text}}
print(json.dumps(found))
"""


RUN_AS_CELL = """
import linecache, sys
text = open(sys.argv[1]).read()
linecache.cache["cell"] = (len(text), None, text.splitlines(True), "cell")
exec(compile(text, "cell", "exec"))
"""
"""Runs a file as notebooks run a cell: `__main__` is no file, and `linecache` alone has the text."""


def written(tmp_path: Path, objects: str, way: str = "auto", run: tuple[str, ...] = ()) -> dict[str, Any]:
    (tmp_path / "beside.py").write_text(
        "import second\nconstant = 7\ndef helper(x): return second.twice(x)\n"
    )
    (tmp_path / "second.py").write_text("def twice(x): return 2 * x\n")
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK.format(folder=str(tmp_path), objects=objects, way=way))
    done = subprocess.run([sys.executable, *run, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def called(tmp_path: Path, found: dict[str, Any], role: str, then: str = "") -> object:
    """What the object returns in a process that has nothing but the files."""
    folder = tmp_path / "there"
    folder.mkdir()
    files, names = found["files"], found["names"]
    for name, content in files.items():
        (folder / name).write_bytes(content.encode("latin-1"))
    module, _, name = names[role].partition(":")
    program = f"import json; from {module} import {name} as it; assert it.__module__ == {module!r}; "
    program += f"print(json.dumps(it(){then}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("run", [(), ("-c", RUN_AS_CELL)], ids=["script", "cell"])
def test_what_is_self_contained_is_written_down(tmp_path: Path, run: tuple[str, ...]) -> None:
    found = written(tmp_path, "{'model': sound}", "source", run)
    assert set(found["files"]) == {"from_notebook.py", "beside.py", "second.py"}
    assert (found["python"], found["requirements"]) == ("", [])
    assert called(tmp_path, found, "model") == [6, 2, 3, 2, 7, True, 0]


@pytest.mark.parametrize(
    ("objects", "then", "result"),
    [
        ("{'model': uses_handle}", "", "/nowhere"),
        ("{'model': around(5)}", "", 5),
        ("{'model': lambda: WIDTH}", "", 3),
        ("{'data': Items()}", "[1]", {"x": 1}),
    ],
)
def test_what_is_not_is_pickled_and_says_by_which_python(
    tmp_path: Path, objects: str, then: str, result: object
) -> None:
    found = written(tmp_path, objects)
    assert "from_notebook.pickle" in found["files"]
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "cloudpickle" in found["requirements"]
    assert called(tmp_path, found, next(iter(found["names"])), then) == result


@pytest.mark.parametrize(
    ("objects", "way", "line"),
    [
        (
            "{'model': uses_handle}",
            "source",
            "it uses HANDLE, a PosixPath, so it can't be written down as source",
        ),
        ("{'model': around(1)}", "source", "inside uses variables of the function around it"),
        ("{'model': 3}", "auto", "model: a int can't be called; give a function"),
        (
            "{'model': (lambda lock: lambda: lock)(__import__('_thread').allocate_lock())}",
            "auto",
            "can't be pickled",
        ),
    ],
)
def test_what_can_not_travel_is_one_line(tmp_path: Path, objects: str, way: str, line: str) -> None:
    error = written(tmp_path, objects, way)["error"]
    assert isinstance(error, str)
    assert line in error
    assert "\n" not in error


def test_what_a_module_defines_travels_as_its_file(tmp_path: Path) -> None:
    found = written(tmp_path, "{'model': helper, 'loss': 'mine:loss'}")
    assert found["names"] == {"model": "beside:helper", "loss": "mine:loss"}
    assert set(found["files"]) == {"beside.py", "second.py"}
